"""Products of groups of rows with one matrix per group, for a mixture of experts.

torch's op has a shape function for bfloat16 only, no forward derivative and no vmap rule. It also rejects matrices with
rows that do not begin at multiples of 16 bytes, which a shard may have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .. import _torch
from ..collectives import keeping_grad_mode
from ..errors import TracingError
from ..ir import current_source, register_differentiable
from ..rules import Rule, rule
from ..tracing import intercept

__all__ = ["grouped_mm", "grouped_outer"]

_library = torch.library.Library("fp", "FRAGMENT")
_library.define("grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor")
_library.define("grouped_outer(Tensor rows, Tensor others, Tensor ends) -> Tensor")


def grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows by the matrix of the group.

    Args:
        rows: shape (rows, inner).
        matrices: shape (groups, inner, columns).
        ends: the row after the last one of each group; rows after the last group give zeros.

    Returns:
        Shape (rows, columns).
    """
    with keeping_grad_mode():
        return _GroupedProduct.apply(rows, matrices, ends)  # type: ignore[no-any-return]


def grouped_outer(rows: torch.Tensor, others: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the transpose of each group of rows by the same group of other rows.

    Args:
        rows: shape (rows, left).
        others: shape (rows, right).
        ends: the row after the last one of each group.

    Returns:
        Shape (groups, left, right).
    """
    with keeping_grad_mode():
        return _GroupedOuter.apply(rows, others, ends)  # type: ignore[no-any-return]


# -----------------------------------------------------------------------------
# The ops
# -----------------------------------------------------------------------------


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Iterate over the groups that have rows, with their slices."""
    bounds = [0, *ends.tolist()]
    return (
        (group, slice(*bounds[group : group + 2])) for group in range(len(ends)) if bounds[group] < bounds[group + 1]
    )


def _product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda and _aligned(rows, matrices):
        return _torch.grouped_mm(rows, matrices, offs=ends).contiguous()
    found = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for group, held in _groups(ends):
        torch.mm(rows[held], matrices[group], out=found[held])
    return found


def _outer(rows: torch.Tensor, others: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if rows.is_cuda and _aligned(rows.mT, others):
        return _torch.grouped_mm(rows.mT, others, offs=ends).contiguous()
    found = rows.new_zeros(len(ends), rows.shape[1], others.shape[1])
    for group, held in _groups(ends):
        torch.mm(rows[held].mT, others[held], out=found[group])
    return found


def _aligned(*matrices: torch.Tensor) -> bool:
    """Whether torch's kernel supports these matrices: rows or columns must begin at multiples of 16 bytes."""
    strides = [sorted(matrix.stride()[-2:]) for matrix in matrices]
    whole = all(
        inner == 1 and outer >= min(matrix.shape[-2:]) and outer * matrix.itemsize % 16 == 0
        for matrix, (inner, outer) in zip(matrices, strides, strict=True)
    )
    return whole and matrices[0].dtype in (torch.float32, torch.bfloat16, torch.float16)


for _name, _kernel, _shape in (
    ("grouped_mm", _product, lambda rows, matrices, ends: rows.new_empty(rows.shape[0], matrices.shape[2])),
    ("grouped_outer", _outer, lambda rows, others, ends: rows.new_empty(len(ends), rows.shape[1], others.shape[1])),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp::{_name}", _shape, lib=_library)


# -----------------------------------------------------------------------------
# Their derivatives: each is the transpose of the other
# -----------------------------------------------------------------------------


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(rows: Any, matrices: Any, ends: Any) -> Any:
        return torch.ops.fp.grouped_mm.default(rows, matrices, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        rows, matrices, ends = ctx.saved_tensors
        of_rows = grouped_mm(cotangent, matrices.mT, ends) if ctx.needs_input_grad[0] else None
        return of_rows, grouped_outer(rows, cotangent, ends) if ctx.needs_input_grad[1] else None, None

    @staticmethod
    def jvp(ctx: Any, of_rows: Any, of_matrices: Any, _: Any) -> Any:
        rows, matrices, ends = ctx.saved_tensors
        return _bilinear(grouped_mm, rows, matrices, ends, of_rows, of_matrices)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(grouped_mm, info, in_dims, args)


class _GroupedOuter(torch.autograd.Function):
    @staticmethod
    def forward(rows: Any, others: Any, ends: Any) -> Any:
        return torch.ops.fp.grouped_outer.default(rows, others, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        rows, others, ends = ctx.saved_tensors
        of_rows = grouped_mm(others, cotangent.mT, ends) if ctx.needs_input_grad[0] else None
        return of_rows, grouped_mm(rows, cotangent, ends) if ctx.needs_input_grad[1] else None, None

    @staticmethod
    def jvp(ctx: Any, of_rows: Any, of_others: Any, _: Any) -> Any:
        rows, others, ends = ctx.saved_tensors
        return _bilinear(grouped_outer, rows, others, ends, of_rows, of_others)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _one_by_one(grouped_outer, info, in_dims, args)


def _bilinear(product: Any, left: Any, right: Any, ends: Any, of_left: Any, of_right: Any) -> Any:
    terms = [product(of_left, right, ends)] if of_left is not None else []
    terms += [product(left, of_right, ends)] if of_right is not None else []
    return sum(terms[1:], terms[0])


def _one_by_one(product: Any, info: Any, in_dims: Any, args: Any) -> Any:
    mapped = [
        [arg] * info.batch_size if dim is None else arg.unbind(dim) for arg, dim in zip(args, in_dims, strict=True)
    ]
    return torch.stack([product(*each) for each in zip(*mapped, strict=True)]), 0


for _op, _function, _text in (
    (torch.ops.fp.grouped_mm.default, grouped_mm, "~s^ k+, ~e^ k+ n, e^ -> s n"),
    (torch.ops.fp.grouped_outer.default, grouped_outer, "~s^ k, ~s^ n, e^ -> e k n"),
):
    register_differentiable(_op, _function)
    rule([_op], Rule(_text))


# -----------------------------------------------------------------------------
# torch's function
# -----------------------------------------------------------------------------


def _grouped_mm(a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Compute torch's grouped_mm. An operand is a list of rows, split at `offs` into groups, or a stack of matrices."""
    if a.ndim == 3 and b.ndim == 3:
        found = torch.bmm(a, b)
    elif offs is None or {a.ndim, b.ndim} - {2, 3}:
        raise TracingError(
            f"{current_source()}: grouped_mm takes matrices of 2 or 3 dims, and offs= where one has 2; these have "
            f"{a.ndim} and {b.ndim}, and offs is {'missing' if offs is None else 'given'}"
        )
    elif b.ndim == 3:
        found = grouped_mm(a, b, offs)
    elif a.ndim == 3:
        found = grouped_mm(b.mT, a.mT, offs).mT
    else:
        found = grouped_outer(a.mT, b, offs)
    found = found if bias is None else found + bias
    return found if out_dtype is None else found.to(out_dtype)


intercept(_torch.grouped_mm, always=True)(_grouped_mm)


@intercept(torch.nn.functional.grouped_mm, always=True)
def _of_nn(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    return _grouped_mm(mat_a, mat_b, offs, bias, out_dtype)
