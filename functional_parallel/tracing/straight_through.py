"""Value with the gradient of another value: the result of an in-place op under `torch.no_grad()`.

Such an op changes the values of a tensor and keeps its history, as straight-through estimators do. Gradients are off
only in reverse mode, so tangents are the tangents of the new values.
"""

from __future__ import annotations

from typing import Any

import torch

from ..collectives import keeping_grad_mode
from ..ir import register_differentiable

__all__ = ["OP", "straight_through"]

_library = torch.library.Library("fp", "FRAGMENT")
_library.define("straight_through(Tensor x, Tensor value) -> Tensor")
_library.impl("straight_through", lambda x, value: value.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("fp::straight_through", lambda x, value: torch.empty_like(value), lib=_library)
OP = torch.ops.fp.straight_through.default


def straight_through(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return `value` with the gradient of `x`.

    >>> x = torch.tensor(3.0)
    >>> torch.func.grad_and_value(lambda x: straight_through(5 * x, x.round() ** 2))(x)
    (tensor(5.), tensor(9.))

    Args:
        x: tensor that receives the gradient.
        value: tensor with the values and tangents of the result; it has the shape of x.
    """
    with keeping_grad_mode():
        return _StraightThrough.apply(x, value)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(x: Any, value: Any) -> Any:
        return OP(x, value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def jvp(ctx: Any, of_x: Any, of_value: Any) -> Any:
        return torch.zeros_like(of_x) if of_value is None else of_value.clone()

    @staticmethod
    def backward(ctx: Any, cotangent: Any) -> Any:
        return cotangent, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Any, value: Any) -> Any:
        x, value = (
            each.expand(info.batch_size, *each.shape) if dim is None else each.movedim(dim, 0)
            for each, dim in zip((x, value), in_dims, strict=True)
        )
        return _StraightThrough.apply(x, value), 0


register_differentiable(OP, straight_through)
