"""pmax and pmin: elementwise maximum and minimum over the ranks. They have no derivative.

A zero derivative would be wrong. The correct one depends on how ties between ranks are split. A sharded softmax, the
usual application of pmax, does not need it, because the maximum cancels.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ...errors import NotDifferentiableError
from ..types import State
from .emit import named_vmap, register, save_for_transpose

__all__ = ["Pmax", "Pmin"]


def _refuse(operation: str, axes: Any) -> NoReturn:
    raise NotDifferentiableError(
        f"{operation} over {axes}: it has no derivative; where the value acts as a constant (a softmax's maximum) "
        f"write fp.{operation}(x.detach(), ...)"
    )


# ---------------------------------------------------------------------------------------------------------------------
# pmax: V → I
# ---------------------------------------------------------------------------------------------------------------------


@register
class Pmax(torch.autograd.Function):
    """Elementwise maximum over the ranks."""

    operation = "pmax"

    @staticmethod
    def leaves() -> State:
        return State.INVARIANT

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any) -> Any:
        return torch.ops.fp.pmax(x, axes)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        _refuse("pmax", ctx.params[0])

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        _refuse("pmax", ctx.params[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(Pmax, info, in_dims, *inputs)


# ---------------------------------------------------------------------------------------------------------------------
# pmin: V → I
# ---------------------------------------------------------------------------------------------------------------------


@register
class Pmin(torch.autograd.Function):
    """Elementwise minimum over the ranks."""

    operation = "pmin"

    @staticmethod
    def leaves() -> State:
        return State.INVARIANT

    @staticmethod
    def forward(x: Any, lane: Any, axes: Any) -> Any:
        return torch.ops.fp.pmin(x, axes)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        save_for_transpose(ctx, inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        _refuse("pmin", ctx.params[0])

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        _refuse("pmin", ctx.params[0])

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> Any:
        return named_vmap(Pmin, info, in_dims, *inputs)
