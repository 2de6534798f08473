"""`_torch.quick_apply` of a Function does what the Function's `apply` does, under every transform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.overrides import TorchFunctionMode

from functional_parallel import _torch

from .count import Count


class Cubed(torch.autograd.Function):
    """x³ times a number, with a derivative of its own: three times as steep."""

    @staticmethod
    def forward(x: Tensor, beside: Tensor | None, factor: int) -> Tensor:
        assert not x.requires_grad or not torch.is_grad_enabled()
        return x * x * x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.factor = inputs[2]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        return 9 * ctx.factor * ctx.saved_tensors[0] ** 2 * cotangent, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:  # type: ignore[override]
        return tangent * 100 * ctx.factor

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, beside: Tensor | None, factor: int) -> Any:
        return Cubed.apply(x, beside, factor + 1), in_dims[0]


QUICK = _torch.quick_apply(Cubed)
X = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
CALLS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "plain": lambda f, x: f(x),
    "gradient": lambda f, x: grad(lambda x: f(x).sum())(x),
    "gradient of another value": lambda f, x: grad(lambda y: (f(x) * y).sum())(x),
    "of a shape": lambda f, x: grad(lambda x: f(x.detach()).sum() + x.sum())(x),
    "Hessian": lambda f, x: hessian(lambda x: f(x).sum())(x),
    "nested gradients": lambda f, x: grad(lambda x: grad(lambda y: (f(x * y) * f(x)).sum())(x).sum())(x),
    "Jacobian": lambda f, x: jacrev(f)(x),
    "mapped": lambda f, x: vmap(f)(x),
    "mapped gradient": lambda f, x: vmap(grad(f))(x),
    "gradient of a map": lambda f, x: grad(lambda x: vmap(f)(x).sum())(x),
    "tangent": lambda f, x: jvp(f, (x,), (x,)),
    "tangent of a gradient": lambda f, x: jvp(grad(lambda x: f(x).sum()), (x,), (x,)),
    "autograd": lambda f, x: torch.autograd.grad(f(x.requires_grad_()).sum(), x),
    "autograd around a gradient": lambda f, x: torch.autograd.grad(
        (grad(lambda y: (f(y) * f(x)).sum())(x.requires_grad_())).sum(), x
    ),
    "without gradients": lambda f, x: grad(lambda x: unrecorded(f, x).sum() + x.sum())(x),
    "without gradients outside": lambda f, x: unrecorded(grad(lambda x: f(x).sum()), x),
    "inference mode": lambda f, x: torch.inference_mode()(f)(x),
}


def unrecorded(f: Callable[[Tensor], Any], x: Tensor) -> Any:
    with torch.no_grad():
        return f(x)


@pytest.mark.parametrize("name", CALLS)
def test_it_is_apply(name: str) -> None:
    found, wanted = (CALLS[name](lambda x, apply=apply: apply(x, None, 2), X.clone()) for apply in (QUICK, Cubed.apply))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_dual_number_keeps_its_tangent() -> None:
    for apply in (QUICK, Cubed.apply):
        with forward_ad.dual_level():
            result = apply(forward_ad.make_dual(X, X), None, 2)
            assert torch.equal(forward_ad.unpack_dual(result).tangent, 200 * X)


def test_the_ops_are_those_of_apply_and_the_graph_names_the_function() -> None:
    def seen(apply: Callable[..., Tensor]) -> tuple[list[object], list[str]]:
        names = []

        def f(x: Tensor) -> Tensor:
            result = apply(x, None, 2)
            names.append(str(type(result.grad_fn).__name__ if result.grad_fn is not None else None))
            return result.sum()

        with Count() as mode:
            grad(f)(X)
        return [op for op in mode.seen if op is not torch.ops.prim.device.default], names

    assert seen(QUICK) == seen(Cubed.apply)


def test_a_function_mode_sees_the_tensor_of_the_caller() -> None:
    class Asked(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            held.append(any(each is given for each in args))
            return func(*args, **(kwargs or {}))

    def f(x: Tensor, apply: Callable[..., Tensor]) -> Tensor:
        nonlocal given
        given = x
        with Asked():
            return apply(x, None, 2).sum()

    given = X
    for apply in (QUICK, Cubed.apply):
        held: list[bool] = []
        grad(lambda x, apply=apply: f(x, apply))(X)
        assert any(held)


def test_torch_makes_classes_for_each_call() -> None:
    """So that there is a reason for `quick_apply`."""

    def classes(apply: Callable[..., Tensor]) -> int:
        found = set()

        def f(x: Tensor) -> Tensor:
            for _ in range(3):
                result = apply(x, None, 2)
                found.add(type(result.grad_fn))
            return result.sum()

        grad(f)(X)
        return len(found)

    assert (classes(QUICK), classes(Cubed.apply)) == (1, 3)
