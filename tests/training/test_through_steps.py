"""A training step is a function: a derivative goes through it, by the batch that it learned from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

from ..processes import outcome, run_on_processes

GENERATOR = torch.Generator().manual_seed(0)
W, B = (torch.randn(size, dtype=torch.float64, generator=GENERATOR) for size in ((4, 4), (4,)))
X = torch.randn(6, 4, dtype=torch.float64, generator=GENERATOR)
DATA = Mesh(data=2)
PLANS = {
    "data": fp.data_parallel("data"),
    "zero 1": fp.zero(1, "data"),
    "zero 3": fp.zero(3, "data"),
}
OPTIMIZERS = {
    "sgd": fp.optim.sgd(0.5, momentum=0.5),
    "adam": fp.optim.adam(0.1),
    "adamw": fp.optim.adamw(0.1),
}


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"]).square().mean() * params["b"].square().sum()


def after_two_steps(optimizer: Any, clip: float | None = None) -> Callable[[Tensor], Tensor]:
    def f(x: Tensor) -> Tensor:
        params = {"w": W, "b": B}
        state = optimizer.init(params)
        for _ in range(2):
            gradients = torch.func.grad(loss)(params, x)
            if clip is not None:
                norm = sum(g.square().sum() for g in gradients.values()).sqrt()
                gradients = {key: g * (clip / (norm + 1e-6)).clamp(max=1.0) for key, g in gradients.items()}
            params, state = optimizer.update(gradients, state, params)
        return loss(params, x)

    return f


def trained(optimizer: Any, plan: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    step = fp.train_step(loss, optimizer, DATA, plan, **options)

    def f(x: Tensor) -> Tensor:
        state = step.init({"w": W, "b": B})
        for _ in range(2):
            state, _ = step(state, x)
        return step(state, x)[1].loss

    return f


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_of_an_update(name: str) -> None:
    """AdamW's op for many parameters has no derivative; its formula has."""
    f, direction, size = after_two_steps(OPTIMIZERS[name]), torch.ones_like(X), 1e-5
    difference = (f(X + size * direction) - f(X - size * direction)) / (2 * size)
    torch.testing.assert_close((torch.func.grad(f)(X) * direction).sum(), difference, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("options", [{}, {"donate": False}, {"bucket": 64}, {"clip": 0.1}], ids=str)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.every(3)
def test_of_steps(plan: str, options: dict[str, Any]) -> None:
    for optimizer in OPTIMIZERS.values():
        f, wanted = trained(optimizer, PLANS[plan], **options), after_two_steps(optimizer, options.get("clip"))
        close(f(X), wanted(X))
        close(torch.func.grad(f)(X), torch.func.grad(wanted)(X))


def on_a_process(rank: int) -> dict[tuple[str, str], Tensor]:
    names = [(plan, name) for plan in PLANS for name in OPTIMIZERS]
    return {(plan, name): torch.func.grad(trained(OPTIMIZERS[name], PLANS[plan]))(X) for plan, name in names}


def test_of_steps_on_processes() -> None:
    for found in run_on_processes(on_a_process, 2):
        for (_, name), gradient in found.items():
            close(gradient, torch.func.grad(after_two_steps(OPTIMIZERS[name]))(X))


def test_a_modules_own_parameters_keep_no_steps() -> None:
    """They ask autograd to record, and it would record one step after the other."""
    step = fp.train_step(loss, OPTIMIZERS["adamw"], DATA, PLANS["zero 1"])
    state = step.init({"w": torch.nn.Parameter(W.clone()), "b": torch.nn.Parameter(B.clone())})
    for _ in range(2):
        state, metrics = step(state, X)
    assert not metrics.loss.requires_grad
    close(loss(step.params(state), X), after_two_steps(OPTIMIZERS["adamw"])(X))


def test_where_a_gradient_is_zero_the_update_has_a_derivative() -> None:
    x = X.clone()
    x[:, 0] = 0  # and so are the gradients of the first row
    assert torch.func.grad(trained(OPTIMIZERS["adamw"], PLANS["zero 1"]))(x).isfinite().all()


def test_what_is_masked_whole_has_a_largest_value_that_is_none() -> None:
    """The largest of nothing but -inf, over samples that two ranks share."""

    def largest(w: Tensor, x: Tensor) -> Tensor:
        masked = (x @ w).masked_fill(torch.tensor([True, False, False, False]), -torch.inf)
        return masked.amax(0).clamp(min=-1.0).sum() + masked.amax().clamp(min=-1.0)

    for plan in PLANS.values():
        compiled = fp.compile(plan(largest), DATA)
        assert torch.equal(compiled(W, X), largest(W, X))
        close(torch.func.grad(compiled)(W, X), torch.func.grad(largest)(W, X))


def test_many_steps_that_are_kept_for_a_derivative() -> None:
    """As on what another model computed: the state grew with every step, without a word."""
    step = fp.train_step(loss, fp.optim.sgd(0.1), DATA, fp.zero(3, "data"))

    def train(x: Tensor, state: Any, steps: int) -> Any:
        for _ in range(steps):
            state, _ = step(state, x)
        return state

    state = train(X.clone().requires_grad_(), step.init({"w": W, "b": B}), 31)
    with pytest.warns(RuntimeWarning, match=r"the last 32 steps took a batch.*that require a gradient.*x\.detach\(\)"):
        train(X.clone().requires_grad_(), state, 1)
    assert train(X, step.init({"w": W, "b": B}), 40).recorded == 0
    with torch.no_grad():
        assert train(X.clone().requires_grad_(), step.init({"w": W, "b": B}), 40).recorded == 0


def on_a_rank_whose_batch_requires_a_gradient(rank: int) -> tuple[str, str, float]:
    step = fp.train_step(loss, fp.optim.sgd(0.1), DATA, fp.zero(3, "data"))
    state, _ = step(step.init({"w": W, "b": B}), X)
    return outcome(lambda: step(state, X.clone().requires_grad_(rank == 1)))


def test_a_batch_that_requires_a_gradient_on_one_rank() -> None:
    """Its values were said to differ, which they do not."""
    for kind, message, _ in run_on_processes(on_a_rank_whose_batch_requires_a_gradient, 2):
        assert kind == "CallMismatchError" and "doing different things" in message
    assert ", on tensors that require a gradient (its call" in message, "as the rank itself tells"
