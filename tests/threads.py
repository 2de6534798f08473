"""A thread of autograd's, in which it runs a backward, as it does on CUDA: here too, where backwards nest deeply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Function = Callable[[torch.Tensor], torch.Tensor]

_DEPTH = 64  # autograd nests 60 backwards in one thread


def in_backward_thread(function: Function, x: torch.Tensor) -> torch.Tensor:
    """`function(x)`, called by a backward that autograd runs in a thread of its own."""
    return _backward(function, x, _DEPTH)


def _backward(function: Function, x: torch.Tensor, depth: int) -> torch.Tensor:
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad(_Nested.apply(y, function, depth), y, x)[0]


class _Nested(torch.autograd.Function):
    """The identity, whose backward is a function of the cotangent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: Function, depth: int) -> torch.Tensor:  # type: ignore[override]
        ctx.function, ctx.depth = function, depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        nested = ctx.function(cotangent) if not ctx.depth else _backward(ctx.function, cotangent, ctx.depth - 1)
        return nested, None, None
