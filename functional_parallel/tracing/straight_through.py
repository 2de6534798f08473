"""Value with the gradient of another value: the result of an in-place op under `torch.no_grad()`.

Such an op changes the values of a tensor and keeps its history, as straight-through estimators do. Gradients are off
only in reverse mode, so tangents are the tangents of the new values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .. import _torch
from ..collectives import keeping_grad_mode
from ..ir import define_op


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """Return `value` with the gradient of `x`. They have the same shape.

    >>> x = torch.tensor(3.0)
    >>> torch.func.grad_and_value(lambda x: straight_through(5 * x, x.round() ** 2))(x)
    (tensor(5.), tensor(9.))
    """
    with keeping_grad_mode():
        return _apply(x, value)


@_torch.without_zeros
class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, value: Tensor) -> Tensor:
        result: Tensor = OP(x, value)
        return result

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def jvp(ctx: FunctionCtx, of_x: Tensor, of_value: Tensor | None) -> Tensor:
        return torch.zeros_like(of_x) if of_value is None else of_value.clone()

    @staticmethod
    def backward(ctx: FunctionCtx, cotangent: Tensor) -> tuple[Tensor, None]:
        return cotangent, None

    @staticmethod
    def vmap(
        info: _torch.VmapInfo, in_dims: tuple[int | None, int | None], x: Tensor, value: Tensor
    ) -> tuple[Tensor, int]:
        x, value = (
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip((x, value), in_dims, strict=True)
        )
        return _apply(x, value), 0


_apply: Callable[[Tensor, Tensor], Tensor] = _StraightThrough.apply
OP = define_op(
    "straight_through(Tensor x, Tensor value) -> Tensor",
    lambda x, value: value.clone(),
    lambda x, value: torch.empty_like(value),
    straight_through,
)
