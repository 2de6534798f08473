"""Products of groups of rows with one matrix per group, for a mixture of experts.

torch's op has a shape function for bfloat16 only, no forward derivative and no vmap rule. It also rejects matrices with
rows that do not begin at multiples of 16 bytes, which a shard may have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .. import _torch
from .._torch import FunctionContext, InDims, VmapInfo
from ..collectives import keeping_grad_mode
from ..errors import TracingError
from ..ir import current_source, define_op
from ..rules import Rule, rule
from ..tracing import intercept

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
Derivative = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def grouped_mm(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its matrix of (groups, inner, columns). Rows after the last of `ends` give 0."""
    with keeping_grad_mode():
        return _apply_product(rows, matrices, ends)


def grouped_outer(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    """Multiply the transpose of each group of rows by the same group of other rows: (groups, left, right)."""
    with keeping_grad_mode():
        return _apply_outer(rows, others, ends)


# --- The ops ---


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    bounds = [0, *ends.tolist()]
    return (
        (group, slice(*bounds[group : group + 2])) for group in range(len(ends)) if bounds[group] < bounds[group + 1]
    )


def _product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if rows.is_cuda and _aligned(rows, matrices):
        return _torch.grouped_mm(rows, matrices, offs=ends).contiguous()
    found = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for group, held in _groups(ends):
        torch.mm(rows[held], matrices[group], out=found[held])
    return found


def _outer(rows: Tensor, others: Tensor, ends: Tensor) -> Tensor:
    if rows.is_cuda and _aligned(rows.mT, others):
        return _torch.grouped_mm(rows.mT, others, offs=ends).contiguous()
    found = rows.new_zeros(len(ends), rows.shape[1], others.shape[1])
    for group, held in _groups(ends):
        torch.mm(rows[held].mT, others[held], out=found[group])
    return found


def _aligned(*matrices: Tensor) -> bool:
    """Whether torch's kernel supports these matrices: rows or columns must begin at multiples of 16 bytes."""
    strides = [sorted(matrix.stride()[-2:]) for matrix in matrices]
    whole = all(
        inner == 1 and outer >= min(matrix.shape[-2:]) and outer * matrix.itemsize % 16 == 0
        for matrix, (inner, outer) in zip(matrices, strides, strict=True)
    )
    return whole and matrices[0].dtype in (torch.float32, torch.bfloat16, torch.float16)


_PRODUCT = define_op(
    "grouped_mm(Tensor rows, Tensor matrices, Tensor ends) -> Tensor",
    _product,
    lambda rows, matrices, ends: rows.new_empty(rows.shape[0], matrices.shape[2]),
    grouped_mm,
)
_OUTER = define_op(
    "grouped_outer(Tensor rows, Tensor others, Tensor ends) -> Tensor",
    _outer,
    lambda rows, others, ends: rows.new_empty(len(ends), rows.shape[1], others.shape[1]),
    grouped_outer,
)
rule([_PRODUCT], Rule("~s^ k+, ~e^ k+ n, e^ -> s n"))
rule([_OUTER], Rule("~s^ k, ~s^ n, e^ -> e k n"))


# --- Their derivatives: each is the transpose of the other ---


def _bilinear(op: Product, function: Product, of_left: Derivative, of_right: Derivative) -> Product:
    @_torch.without_zeros
    class Bilinear(torch.autograd.Function):
        @staticmethod
        def forward(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
            return op(left, right, ends)

        @staticmethod
        def setup_context(ctx: FunctionContext, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: FunctionContext, cotangent: Tensor) -> tuple[Tensor | None, ...]:
            needed = zip((of_left, of_right), ctx.needs_input_grad, strict=False)  # `ends` has no gradient
            return *(of(cotangent, *ctx.saved_tensors) if needs else None for of, needs in needed), None

        @staticmethod
        def jvp(ctx: FunctionContext, of_left: Tensor | None, of_right: Tensor | None, _: None) -> Tensor:
            left, right, ends = ctx.saved_tensors
            terms = [function(of_left, right, ends)] if of_left is not None else []
            terms += [function(left, of_right, ends)] if of_right is not None else []
            return sum(terms[1:], terms[0])

        @staticmethod
        def vmap(info: VmapInfo, in_dims: InDims, *operands: Tensor) -> tuple[Tensor, int]:
            mapped = [
                [x] * info.batch_size if dim is None else x.unbind(dim)
                for x, dim in zip(operands, in_dims, strict=True)
            ]
            return torch.stack([function(*each) for each in zip(*mapped, strict=True)]), 0

    return Bilinear.apply


_apply_product = _bilinear(
    _PRODUCT,
    grouped_mm,
    lambda cotangent, rows, matrices, ends: grouped_mm(cotangent, matrices.mT, ends),
    lambda cotangent, rows, matrices, ends: grouped_outer(rows, cotangent, ends),
)
_apply_outer = _bilinear(
    _OUTER,
    grouped_outer,
    lambda cotangent, rows, others, ends: grouped_mm(others, cotangent.mT, ends),
    lambda cotangent, rows, others, ends: grouped_mm(rows, cotangent, ends),
)


# --- torch's function ---


@intercept(torch.nn.functional.grouped_mm, always=True)
@intercept(_torch.grouped_mm, always=True)
def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    a, b = mat_a, mat_b
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
