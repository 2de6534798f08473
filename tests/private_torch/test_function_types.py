"""torch passes to the methods of an autograd.Function what `functional_parallel/_torch/functions.py` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from functional_parallel import _torch


class Product(torch.autograd.Function):
    """x · y, with every method that a Function of the library has."""

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: _torch.FunctionContext, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: _torch.FunctionContext, of_x: Tensor | None, of_y: Tensor | None) -> Tensor | None:
        _, y = ctx.saved_tensors
        assert of_y is None
        return None if of_x is None else of_x * y

    @staticmethod
    def backward(ctx: _torch.FunctionContext, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        _, y = ctx.saved_tensors
        assert ctx.needs_input_grad == (True, False)
        return cotangent * y, None

    @staticmethod
    def vmap(info: _torch.VmapInfo, in_dims: _torch.InDims, x: Tensor, y: Tensor) -> tuple[Tensor, int]:
        assert (info.batch_size, in_dims) == (3, (0, None))
        return Product.apply(x, y), 0  # type: ignore[no-untyped-call]


def test_types_of_the_arguments_of_a_function() -> None:
    x, y = torch.arange(3.0), torch.tensor(5.0)
    assert torch.equal(torch.func.grad(lambda x: Product.apply(x, y).sum())(x), torch.full((3,), 5.0))
    assert torch.equal(torch.func.jvp(lambda x: Product.apply(x, y), (x,), (x,))[1], 5 * x)
    assert torch.equal(torch.func.vmap(torch.func.grad(lambda x: Product.apply(x, y)))(x), torch.full((3,), 5.0))


class Constant(torch.autograd.Function):
    """A copy whose gradient is undefined."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: _torch.FunctionContext, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: _torch.FunctionContext, cotangent: Tensor) -> None:  # type: ignore[override]
        return None


@pytest.mark.parametrize("decorated", [True, False])
def test_a_backward_without_a_cotangent_is_left_out(decorated: bool) -> None:
    found: list[Tensor] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, factor: float) -> Tensor:
            return x * factor

        @staticmethod
        def setup_context(ctx: _torch.FunctionContext, inputs: tuple[Tensor, float], output: Tensor) -> None:
            assert inputs[1] == 2.0

        @staticmethod
        def backward(ctx: _torch.FunctionContext, cotangent: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
            found.append(cotangent)
            return cotangent * 2.0, None

    double: Any = (_torch.without_zeros(Doubled) if decorated else Doubled).apply
    x = torch.arange(3.0)
    assert torch.equal(torch.func.grad(lambda x: Constant.apply(double(x, 2.0)).sum())(x), torch.zeros(3))
    assert len(found) == (0 if decorated else 1)
    assert torch.equal(torch.func.grad(lambda x: double(double(x, 2.0), 2.0).sum())(x), torch.full((3,), 4.0))
