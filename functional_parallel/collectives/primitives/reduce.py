"""psum and psum_scatter: sum over the ranks, replicated or one chunk per rank."""

from __future__ import annotations

from typing import Any

import torch

from ..types import State
from .emit import apply_primitive, named_vmap, register, save_for_transpose, transpose

__all__ = ["Psum", "PsumScatter"]


# ---------------------------------------------------------------------------------------------------------------------
# psum: V → I, U → I
# ---------------------------------------------------------------------------------------------------------------------


@register
class Psum(torch.autograd.Function):
    """Sum over the ranks. Transposes to a cast: to Varying, or to Reduced if src was Unreduced."""

    operation = "psum"

    @staticmethod
    def leaves(src: str) -> State:
        return State.INVARIANT

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any, src: str) -> Any:
        return torch.ops.fp.psum(x, axes, src)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return apply_primitive("psum", tangent, *ctx.params)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        _, src = ctx.params
        return transpose(ctx, "pcast", cotangent, "invariant", "reduced" if src == "unreduced" else "varying")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(Psum, info, in_dims, *inputs)


# ---------------------------------------------------------------------------------------------------------------------
# psum_scatter: V → V, U → V
# ---------------------------------------------------------------------------------------------------------------------


@register
class PsumScatter(torch.autograd.Function):
    """One chunk of the sum per rank. Transposes to all_gather: to Varying, or to Reduced if src was Unreduced."""

    operation = "psum_scatter"

    @staticmethod
    def leaves(dim: int, src: str) -> State:
        return State.VARYING

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any, dim: int, src: str) -> Any:
        return torch.ops.fp.psum_scatter(x, axes, dim, src)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return apply_primitive("psum_scatter", tangent, *ctx.params)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        _, dim, src = ctx.params
        return transpose(ctx, "all_gather", cotangent, dim, "reduced" if src == "unreduced" else "varying")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(PsumScatter, info, in_dims, *inputs)
