"""Markers: library ops that are the identity, and carry information about their operand to a rerun of the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .._torch import InDims, VmapInfo, without_zeros
from ..ir import define_op

_Parameter = str | Sequence[str] | Sequence[int]


@dataclass(frozen=True)
class Marker:
    op: Callable[..., Tensor]  # recorded by a trace
    apply: Callable[..., Tensor]  # `apply(x, *parameters)` applies it differentiably


class _MarkContext(Protocol):
    parameters: int


def _copy(x: Tensor, *_: _Parameter) -> Tensor:
    return x.clone()


def define_marker(
    schema: str, again: Callable[..., Tensor], *, names_dims: bool, kernel: Callable[..., Tensor] = _copy
) -> Marker:
    """Define the library op of a marker with the schema "name(Tensor x, …)", and the Function that applies it.

    A rerun of a graph calls `again` on the op's arguments. If other arguments are dims of the value (`names_dims`),
    vmap moves the mapped dim to the last position. `kernel` returns a copy of the value, in any memory.
    """
    op: Callable[..., Tensor] = define_op(f"{schema} -> Tensor", kernel, lambda x, *_: torch.empty_like(x), again)

    @without_zeros
    class Defined(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, *parameters: _Parameter) -> Tensor:
            return op(x, *parameters)

        @staticmethod
        def setup_context(ctx: _MarkContext, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.parameters = len(inputs) - 1

        @staticmethod
        def jvp(ctx: _MarkContext, tangent: Tensor, *_: None) -> Tensor:
            return tangent.clone()

        @staticmethod
        def backward(ctx: _MarkContext, cotangent: Tensor) -> tuple[Tensor | None, ...]:
            return cotangent, *(None,) * ctx.parameters

        @staticmethod
        def vmap(info: VmapInfo, in_dims: InDims, x: Tensor, *parameters: _Parameter) -> tuple[Tensor, int]:
            dim = in_dims[0]
            assert dim is not None
            if not names_dims:
                return marker.apply(x, *parameters), dim
            return marker.apply(x.movedim(dim, -1), *parameters), x.ndim - 1

    marker = Marker(op, Defined.apply)
    return marker
