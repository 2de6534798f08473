"""Markers: library ops that are the identity, and carry information about their operand to a rerun of the trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ..ir import register_differentiable

__all__ = ["MarkerOp", "define_marker"]

_library = torch.library.Library("fp", "FRAGMENT")


class MarkerOp(torch.autograd.Function):
    """Identity function with identity derivatives. A trace records the library op `op` for it."""

    op: ClassVar[Any]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.parameters = len(inputs) - 1

    @staticmethod
    def jvp(ctx: Any, tangent: Any, *_: Any) -> Any:
        return tangent.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return cotangent, *(None,) * ctx.parameters


def define_marker(schema: str, again: Callable[..., Any], *, names_dims: bool) -> type[MarkerOp]:
    """Define the library op of a marker, and the Function that applies it.

    Args:
        schema: the name and parameters of the op. The first parameter is the value: "name(Tensor x, …)".
        again: the function that is called on the arguments of the op when its graph is rerun.
        names_dims: whether parameters are dims of the value. If so, vmap moves the mapped dim to the last position.
    """
    name = schema.partition("(")[0]
    _library.define(f"{schema} -> Tensor")
    _library.impl(name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp::{name}", _fake, lib=_library)

    class Defined(MarkerOp):
        op = getattr(torch.ops.fp, name).default

        @staticmethod
        def forward(x: Any, *parameters: Any) -> Any:
            return Defined.op(x, *parameters)

        @staticmethod
        def vmap(info: Any, in_dims: Any, x: Any, *parameters: Any) -> Any:
            if not names_dims:
                return Defined.apply(x, *parameters), in_dims[0]
            return Defined.apply(x.movedim(in_dims[0], -1), *parameters), x.ndim - 1

    register_differentiable(Defined.op, again)
    return Defined


def _kernel(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.clone()


def _fake(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)
