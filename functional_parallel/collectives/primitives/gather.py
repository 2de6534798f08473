"""all_gather and pscatter: from one chunk per rank to the full tensor, and back by a slice."""

from __future__ import annotations

from typing import Any

import torch

from ..types import State
from .emit import apply_primitive, named_vmap, register, save_for_transpose, transpose

__all__ = ["AllGather", "Pscatter"]


# ---------------------------------------------------------------------------------------------------------------------
# all_gather: V → V, V → I, V → R
# ---------------------------------------------------------------------------------------------------------------------


@register
class AllGather(torch.autograd.Function):
    """Concatenation of all ranks' chunks. The type of the result determines the transpose.

    To Varying or Reduced, each rank has a separate gradient of the full tensor, and psum_scatter sums the gradients. To
    Invariant, all ranks have one gradient, and each rank keeps its slice.
    """

    operation = "all_gather"

    @staticmethod
    def leaves(dim: int, dst: str) -> State:
        return State(dst)

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any, dim: int, dst: str) -> Any:
        return torch.ops.fp.all_gather(x, axes, dim, dst)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return apply_primitive("all_gather", tangent, *ctx.params)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        _, dim, dst = ctx.params
        if dst == "invariant":
            return transpose(ctx, "pscatter", cotangent, dim)
        return transpose(ctx, "psum_scatter", cotangent, dim, "unreduced" if dst == "reduced" else "varying")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(AllGather, info, in_dims, *inputs)


# ---------------------------------------------------------------------------------------------------------------------
# pscatter: I → V
# ---------------------------------------------------------------------------------------------------------------------


@register
class Pscatter(torch.autograd.Function):
    """Slice of an Invariant value, without communication. Transposes to all_gather to Invariant."""

    operation = "pscatter"

    @staticmethod
    def leaves(dim: int) -> State:
        return State.VARYING

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any, dim: int) -> Any:
        return torch.ops.fp.pscatter(x, axes, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return apply_primitive("pscatter", tangent, *ctx.params)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        _, dim = ctx.params
        return transpose(ctx, "all_gather", cotangent, dim, "invariant")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(Pscatter, info, in_dims, *inputs)
