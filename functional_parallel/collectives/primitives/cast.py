"""pcast: change of type without a change of values. It sends nothing, but its transpose may."""

from __future__ import annotations

from typing import Any

import torch

from ..types import State
from .emit import apply_primitive, named_vmap, register, save_for_transpose, source_of_cast, transpose

__all__ = ["Pcast"]

# Transpose of a cast from one state to another: a primitive and its arguments after `axes`.
_TRANSPOSES = {
    ("invariant", "varying"): ("psum", "varying"),
    ("invariant", "reduced"): ("psum", "unreduced"),
    ("reduced", "varying"): ("pcast", "varying", "unreduced"),
    ("varying", "unreduced"): ("pcast", "reduced", "varying"),
}


# ---------------------------------------------------------------------------------------------------------------------
# pcast: I → V, I → R, R → V, V → U
# ---------------------------------------------------------------------------------------------------------------------


@register
class Pcast(torch.autograd.Function):
    """Cast to another type. A cast from Invariant transposes to a psum, every other cast to a cast."""

    operation = "pcast"

    @staticmethod
    def leaves(src: str, dst: str) -> State:
        return State(dst)

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any, src: str, dst: str) -> Any:
        return torch.ops.fp.pcast(x, axes, src, dst)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return apply_primitive("pcast", tangent, *ctx.params)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        _, src, dst = ctx.params
        operation, *params = _TRANSPOSES[source_of_cast(src, dst), dst]
        return transpose(ctx, operation, cotangent, *params)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(Pcast, info, in_dims, *inputs)
