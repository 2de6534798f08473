"""Rules of matrix products, decompositions, solvers and transforms. Biases are added apart, after sums over ranks."""

from __future__ import annotations

import torch
from torch import fx

from ...ir import info
from ..registry import Rule, rule
from ..texts import all_whole_text, batched_text, dim_of, ndim_of, whole_along

aten = torch.ops.aten


# --- Matrix products: a sharded contraction leaves partial sums, and sharding of other dims passes through ---

rule([aten.mm.default], Rule("~i k+, ~k+ j -> i j"))
rule([aten.bmm.default], Rule("~b i k+, ~b k+ j -> b i j"))
rule([aten.mv.default], Rule("~i k+, ~k+ -> i"))
rule([aten.dot.default, aten.vdot.default], Rule("~k+, ~k+ -> ()"))


# --- Stacks of matrices: batch dims may be sharded, all others are replicated ---


def _solve_text(node: fx.Node) -> str:
    """Rule of `solve(A, B)`. B is a stack of vectors if it has the shape of A without the last dim."""
    a, b = (info(operand).aval.shape for operand in node.args[:2])
    return batched_text(2, 1 if len(b) == 1 or b == a[:-1] else 2)(node)


def _cross_text(node: fx.Node) -> str:
    a, b = (info(operand).aval.shape for operand in node.args[:2])
    return whole_along(dim_of(node), ndim=len(a), operands=2) if a == b else all_whole_text(node)


rule([aten._linalg_det.default, aten._linalg_slogdet.default, aten.linalg_inv_ex.default], Rule(batched_text(2)))
rule([aten.linalg_cholesky_ex.default, aten.cholesky_inverse.default], Rule(batched_text(2)))
if hasattr(aten, "cholesky"):  # torch 2.14 removed it
    rule([aten.cholesky.default], Rule(batched_text(2)))
rule([aten._linalg_svd.default, aten._linalg_eigh.default, aten.linalg_eig.default], Rule(batched_text(2)))
rule([aten.linalg_qr.default, aten.linalg_lu.default, aten.linalg_lu_factor_ex.default], Rule(batched_text(2)))
rule([aten.linalg_matrix_exp.default], Rule(batched_text(2)))
rule([aten.linalg_pinv.atol_rtol_tensor], Rule(batched_text(2, 0)))
rule([aten._linalg_solve_ex.default], Rule(_solve_text))
rule([aten.linalg_solve_triangular.default, aten.cholesky_solve.default], Rule(batched_text(2)))
rule([aten.linalg_cross.default], Rule(_cross_text))


def _distances_text(node: fx.Node) -> str:
    a, b = (info(operand).aval.shape for operand in node.args[:2])
    if a[:-2] != b[:-2]:
        return all_whole_text(node)
    batch = " ".join(f"b{index}" for index in range(len(a) - 2))
    return f"{batch} n d^, {batch} m d^ -> {batch} n m"


rule([aten._cdist_forward.default], Rule(_distances_text))


# --- Fourier transforms ---


def _transform_text(node: fx.Node) -> str:
    ndim = ndim_of(node)
    return whole_along(*(dim % ndim for dim in node.args[1]), ndim=ndim)


rule([aten._fft_c2c.default, aten._fft_r2c.default, aten._fft_c2r.default], Rule(_transform_text))
