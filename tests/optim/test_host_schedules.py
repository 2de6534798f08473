"""A learning-rate function in plain Python gives what the same function in torch ops gives, under every plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.optim import host_rates
from sharding_specs import Mesh

from ..processes import run_on_processes

STEPS = 5


def in_python(step: int) -> float:
    return 0.1 * (step + 1) / 2 if step < 2 else [0.1, 0.05, 0.025][min(step // 2, 2)]


def in_torch(step: torch.Tensor) -> torch.Tensor:
    later = torch.where(step < 4, torch.full_like(step, 0.05), 0.025)  # in float64; of two numbers it is float32
    return torch.where(step < 2, 0.1 * (step + 1) / 2, later)


OPTIMIZERS: dict[str, Callable[[Any], fp.optim.Optimizer]] = {
    "sgd": fp.optim.sgd,
    "adam": fp.optim.adam,
    "adamw": fp.optim.adamw,
    "lion": fp.optim.lion,
    "adafactor": fp.optim.adafactor,
    "clipped": lambda lr: fp.optim.clip_value(fp.optim.sgd(lr), 0.1),
}
PIPELINE = fp.pipeline("pipe", schedule="1f1b", microbatches=2)
PLANS: dict[str, tuple[Mesh, Any, dict[str, Any]]] = {
    "no plan": (Mesh(), None, {}),
    "zero 3": (Mesh(data=2), fp.zero(3, "data"), {}),
    "flat": (Mesh(data=2), fp.zero(1, "data", layout="flat"), {}),
    "accumulate": (Mesh(data=2), fp.chain(fp.zero(1, "data"), fp.accumulate(2)), {"donate": False}),
    "pipeline": (Mesh(pipe=2), PIPELINE, {"clip": 1.0}),
    "asynchronous": (Mesh(pipe=2), fp.pipeline("pipe", schedule="pipedream", microbatches=2), {}),
}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = fp.stage_boundary(torch.tanh(x @ params["a"]))
    return ((hidden @ params["b"] - x) ** 2).mean()


def train(lr: Any, optimizer: str, plan: str, resume: bool = False) -> list[torch.Tensor]:
    """Return the losses and the last parameters; with `resume`, a state that was saved half way goes on."""
    mesh, transform, options = PLANS[plan]
    draw = torch.Generator().manual_seed(0)
    params = {name: torch.randn(4, 4, generator=draw, dtype=torch.float64) for name in "ab"}
    step = fp.train_step(loss, OPTIMIZERS[optimizer](lr), mesh, transform, **options)
    state, x, found = step.init(params), torch.eye(4).double().repeat(2, 1), []
    for number in range(STEPS):
        if resume and number == STEPS // 2:
            state = step.load(*step.whole(state), 0)  # the optimizer counts its updates; the state's number is free
        state, metrics = step(state, x)
        found.append(metrics.loss)
    return [*found, *step.params(state).values()]


def on_ranks(rank: int, plan: str) -> list[torch.Tensor]:
    return train(in_python, "adamw", plan)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(optimizer: str) -> None:
    for a, b in zip(train(in_python, optimizer, "zero 3"), train(in_torch, optimizer, "zero 3"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan(plan: str) -> None:
    for a, b in zip(train(in_python, "adamw", plan), train(in_torch, "adamw", plan), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("plan", ["zero 3", "pipeline"])
def test_real_ranks(plan: str) -> None:
    alone = train(in_python, "adamw", plan)
    for found in run_on_processes(on_ranks, 2, plan):
        for a, b in zip(found, alone, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


@pytest.mark.parametrize("plan", ["zero 3", "pipeline"])
def test_a_resumed_state_goes_on_where_it_was(plan: str) -> None:
    for a, b in zip(train(in_python, "adamw", plan, resume=True), train(in_torch, "adamw", plan), strict=True):
        assert torch.equal(a, b)


def test_a_skipped_step_does_not_count() -> None:
    """An overflow halves the loss scale and updates nothing, so the rate stays where it was."""
    seen: list[int] = []

    def rate(step: int) -> float:
        seen.append(int(step))  # fails in a trace, as any use of the value does
        return 0.01

    plan = fp.chain(fp.mixed_precision("fp16", loss_scale=fp.LossScale(4.0, hysteresis=1)), fp.data_parallel("data"))
    step = fp.train_step(lambda w, x: (x @ w).square().mean(), fp.optim.sgd(rate), Mesh(data=2), plan)
    state = step.init(torch.ones(4))
    for value in (0.1, 6e4, 0.1):
        state, _ = step(state, torch.full((4, 4), value))
    assert seen == [0, 1, 1]


def test_a_composed_schedule_with_a_host_part() -> None:
    host = fp.optim.schedules.warmup(2, lambda step: 0.1 * math.cos(step))
    ops = fp.optim.schedules.warmup(2, lambda step: 0.1 * torch.cos(torch.as_tensor(step, dtype=torch.float64)))
    for a, b in zip(train(host, "sgd", "zero 3"), train(ops, "sgd", "zero 3"), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)


def test_what_is_no_rate() -> None:
    with pytest.raises(TypeError, match=r"learning-rate function .*nothing returned None for update 0: it returns a"):
        train(nothing, "sgd", "no plan")


def nothing(step: int) -> None:
    if step > 3:
        raise AssertionError
    return None


# -----------------------------------------------------------------------------
# Devices: the host counts updates itself
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["zero 3", "pipeline"])
def test_a_devices_count_is_read_once(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rates, "in_main_memory", lambda step: False)
    reads: list[int] = []
    plainly = host_rates._read
    monkeypatch.setattr(host_rates, "_read", lambda step: reads.append(1) or plainly(step))
    for a, b in zip(train(in_python, "adamw", plan), train(in_torch, "adamw", plan), strict=True):
        assert torch.equal(a, b)
    assert len(reads) == 1
    resumed = train(in_python, "adamw", plan, resume=True)
    assert len(reads) == 3, "once more for the state that was loaded"
    assert all(torch.equal(a, b) for a, b in zip(resumed, train(in_torch, "adamw", plan), strict=True))
