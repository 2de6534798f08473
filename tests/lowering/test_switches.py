"""What is switched on around a call: autocast makes a program of its own, the rest changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh, P

MESH = Mesh(data=2)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return ((torch.relu(x @ params["w1"]) @ params["w2"] - 1) ** 2).mean()


def parameters() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {"w1": torch.randn(4, 8, generator=made), "w2": torch.randn(8, 4, generator=made)}


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def narrow() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


PLANS = {
    "data": (MESH, fp.data_parallel("data")),
    "zero 3": (MESH, fp.zero(3, "data")),
    "tensor": (Mesh(tensor=2), fp.tensor_parallel("tensor", {"w1": P(None, "tensor"), "w2": P("tensor")})),
    "pipeline": (Mesh(pipe=2), fp.pipeline("pipe", microbatches=2)),
}


@pytest.mark.parametrize("plan", PLANS)
def test_autocast_is_that_of_the_call(plan: str) -> None:
    """A program that was traced without it cast its operands when it ran, and one traced under it went on without."""
    mesh, transform = PLANS[plan]
    step = fp.compile(fp.grad_and_value(transform(loss)), mesh)
    values = []
    for around in (narrow, nullcontext, narrow, nullcontext):
        with around():
            grads, value = step(parameters(), X)
            wanted = loss(parameters(), X)
        assert grads["w1"].dtype == torch.float32
        torch.testing.assert_close(value, wanted, rtol=1e-2 if wanted.dtype == torch.bfloat16 else 1e-5, atol=0)
        values.append(value)
    assert torch.equal(values[0], values[2]) and torch.equal(values[1], values[3])


def test_a_step_is_trained_as_autocast_says_at_each_call() -> None:
    train = fp.train_step(loss, fp.optim.adamw(1e-2), *PLANS["zero 3"])
    state = train.init(parameters())
    state, _ = train(state, X)
    for around, types in ((narrow, {torch.bfloat16, torch.float32}), (nullcontext, {torch.float32})):
        with around():
            state, metrics = train(state, X)
        nodes = [info(node).aval.dtype for node in train.program.traced.nodes if "mm" in str(node.target)]
        assert set(nodes) <= types and min(types, key=lambda dtype: dtype.itemsize) in nodes
    assert metrics.loss.dtype == torch.float32, "of the last call, outside"


@pytest.mark.parametrize(
    "around", [torch.inference_mode, torch.no_grad, lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)]
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize(
    "optimizer", [fp.optim.adamw(1e-2), fp.optim.sgd(1e-2, momentum=0.9), fp.optim.adafactor(1e-2)]
)
def test_the_rest_changes_nothing(around: Callable[[], AbstractContextManager[Any]], optimizer: Any) -> None:
    """Anomaly detection looked at values of a trace; a state made in inference mode could not be written into."""
    found = []
    for inside in (nullcontext, around):
        train = fp.train_step(loss, optimizer, *PLANS["zero 3"])
        with inside():
            state = train.init(parameters())
            state, _ = train(state, X)
            kept = train.whole(state)
        state, _ = train(train.load(*kept, 1), X)
        with inside():
            state, _ = train(state, X)
        state, _ = train(state, X)
        found.append(train.params(state))
    for one, other in zip(*map(optree.tree_leaves, found), strict=True):
        assert torch.equal(one, other)
