"""torch passes to the methods of an autograd.Function what `functional_parallel/_torch/functions.py` says."""

from __future__ import annotations

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
