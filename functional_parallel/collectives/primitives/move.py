"""all_to_all, ppermute and pbroadcast: values move between ranks and are not summed."""

from __future__ import annotations

from typing import Any

import torch

from ..axes import restored
from ..types import State
from .emit import apply_primitive, axis_index, named_vmap, register, save_for_transpose, transpose

__all__ = ["AllToAll", "Pbroadcast", "Ppermute"]


# ---------------------------------------------------------------------------------------------------------------------
# all_to_all: V → V
# ---------------------------------------------------------------------------------------------------------------------


@register
class AllToAll(torch.autograd.Function):
    """Exchange that moves chunk i of every rank's value to rank i. Transposes to itself with the two dims swapped."""

    operation = "all_to_all"

    @staticmethod
    def leaves(split_dim: int, concat_dim: int) -> State:
        return State.VARYING

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any, split_dim: int, concat_dim: int) -> Any:
        return torch.ops.fp.all_to_all(x, axes, split_dim, concat_dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return apply_primitive("all_to_all", tangent, *ctx.params)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        _, split_dim, concat_dim = ctx.params
        return transpose(ctx, "all_to_all", cotangent, concat_dim, split_dim)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(AllToAll, info, in_dims, *inputs)


# ---------------------------------------------------------------------------------------------------------------------
# ppermute: V → V
# ---------------------------------------------------------------------------------------------------------------------


@register
class Ppermute(torch.autograd.Function):
    """Value of each source on its target, zeros on the other ranks. Transposes to the inverse pairs."""

    operation = "ppermute"

    @staticmethod
    def leaves(pairs: Any) -> State:
        return State.VARYING

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any, pairs: Any) -> Any:
        return torch.ops.fp.ppermute(x, axes, pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return apply_primitive("ppermute", tangent, *ctx.params)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        _, pairs = ctx.params
        inverse = [rank for source, target in zip(pairs[::2], pairs[1::2], strict=True) for rank in (target, source)]
        return transpose(ctx, "ppermute", cotangent, inverse)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(Ppermute, info, in_dims, *inputs)


# ---------------------------------------------------------------------------------------------------------------------
# pbroadcast: V → I
# ---------------------------------------------------------------------------------------------------------------------


@register
class Pbroadcast(torch.autograd.Function):
    """Value of one rank on every rank. All ranks have the same gradient; the source keeps it, the others drop it."""

    operation = "pbroadcast"

    @staticmethod
    def leaves(source: int) -> State:
        return State.INVARIANT

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any, source: int) -> Any:
        return torch.ops.fp.pbroadcast(x, axes, source)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return apply_primitive("pbroadcast", tangent, *ctx.params)

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        axes, source = ctx.params
        with restored(ctx.environment):
            own = apply_primitive("pcast", cotangent, axes, "invariant", "varying")
            is_source = (axis_index(axes) == source).to(own.device)
        return torch.where(is_source, own, torch.zeros_like(own)), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(Pbroadcast, info, in_dims, *inputs)
