"""Gradients of weights are made the way round in which they are wanted; integers stay exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh, P

aten = torch.ops.aten

PLANS = {
    "data": fp.data_parallel("data"),
    "zero 2": fp.zero(2, "data"),
    "zero 3": fp.zero(3, "data"),
    "zero 3 by columns": fp.zero(3, "data", {"a": P(None, "data"), "b": P(None, "data")}),
    "microbatches": fp.chain(fp.zero(3, "data"), fp.accumulate(2)),
    "each microbatch": fp.chain(fp.zero(2, "data"), fp.accumulate(2, reduce="each")),
    "columns and rows": fp.tensor_parallel("data", {"a": P("data", None), "b": P(None, "data")}),
}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return F.linear(F.linear(x, params["a"]).relu(), params["b"]).relu().sum()


def arguments(width: int, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    a, b, x = (
        torch.randint(-3, 4, shape, generator=generator).double() for shape in ((width, 6), (4, width), (8, 3, 6))
    )
    return {"a": a, "b": b}, x


@pytest.mark.parametrize("name", PLANS)
@settings(max_examples=4)
@given(width=st.integers(1, 9), seed=st.integers(0, 1000))
def test_gradients_are_exact(name: str, width: int, seed: int) -> None:
    width *= 2 if name == "columns and rows" else 1
    step = fp.compile(fp.grad(PLANS[name](loss)), Mesh(data=2))
    params, x = arguments(width, seed)
    found, want = step(params, x), torch.func.grad(loss)(params, x)
    assert all(torch.equal(found[key], want[key]) for key in want)


@pytest.mark.parametrize("name", [name for name in PLANS if name != "columns and rows"])  # there nothing lies crosswise
def test_no_gradient_lies_crosswise(name: str) -> None:
    def turns(**options: Any) -> int:
        step = fp.compile(fp.grad(PLANS[name](loss)), Mesh(data=2), **options)
        return sum(map(turns_after_product, step.lower(*arguments(8, 0)).traced.outputs))

    assert turns() == 0
    assert turns(without=("turned",)) == 2


@pytest.mark.parametrize("name", [None, "data", "columns and rows"])
def test_no_update_takes_a_turned_gradient(name: str | None) -> None:
    """A gradient that is turned twice is not turned at all."""
    plan = None if name is None else PLANS[name]
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2 if name else 1), plan, bucket=None)
    made = gradients(train.lower(*arguments(8, 0)).traced)
    assert made
    assert not any(node.target is aten.t.default for node in made)


def gradients(traced: Any) -> list[torch.fx.Node]:
    """What new parameters are made of, between the product and the update."""
    found, waiting = [], [output for output in traced.outputs if info(output).aval.ndim == 2]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node.target is not aten.mm.default and node not in found:
            found.append(node)
            waiting += node.all_input_nodes
    return found


def turns_after_product(node: torch.fx.Node) -> int:
    found = 0
    while node.target is not aten.mm.default:
        found += node.target is aten.t.default
        node = node.args[0]
    return found


def test_gradients_have_the_bits_of_eager_autograd() -> None:
    """Which computes them the same way round."""
    generator = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(48, 32, generator=generator), "b": torch.randn(16, 48, generator=generator)}
    x = torch.randn(64, 32, generator=generator)
    found = fp.compile(fp.grad(fp.data_parallel("data")(loss)), Mesh(data=1))(params, x)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss(leaves, x).backward()
    for name, leaf in leaves.items():
        assert torch.equal(found[name], leaf.grad)
        assert found[name].is_contiguous()
