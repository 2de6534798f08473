"""Schedules are torch's where it has the same, and DeepSpeed's entry by entry; and they are staged with the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import functional_parallel as fp
from functional_parallel.optim import schedules
from sharding_specs import Mesh


def rates(schedule: Callable[[Any], Any], count: int) -> list[float]:
    return [float(schedule(step)) for step in range(count)]


def torchs(make: Callable[[torch.optim.Optimizer], Any], count: int, base: float = 0.5) -> list[float]:
    """The rate that each of torch's updates would use."""
    optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], base)
    scheduler, found = make(optimizer), []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


WITH_TORCH: dict[str, tuple[Callable[[Any], Any], Callable[[torch.optim.Optimizer], Any], int]] = {
    "constant": (schedules.constant(0.5), lambda o: lr_scheduler.ConstantLR(o, 1.0), 5),
    "linear warm-up": (schedules.linear(0.125, 0.5, 8), lambda o: lr_scheduler.LinearLR(o, 0.25, 1.0, 8), 12),
    "linear decay": (schedules.linear(0.5, 0.0, 10), lambda o: lr_scheduler.LinearLR(o, 1.0, 0.0, 10), 14),
    "cosine": (schedules.cosine(0.5, 9, end=0.1), lambda o: lr_scheduler.CosineAnnealingLR(o, 9, 0.1), 10),
    "exponential": (schedules.exponential(0.5, 0.9), lambda o: lr_scheduler.ExponentialLR(o, 0.9), 12),
    "stairs": (schedules.exponential(0.5, 0.1, every=3, stairs=True), lambda o: lr_scheduler.StepLR(o, 3, 0.1), 12),
    "one after another": (
        schedules.join(
            (3, schedules.linear(0.125, 0.5, 3)), (4, schedules.constant(0.5)), last=schedules.exponential(0.5, 0.5)
        ),
        lambda o: lr_scheduler.SequentialLR(
            o,
            [
                lr_scheduler.LinearLR(o, 0.25, 1.0, 3),
                lr_scheduler.ConstantLR(o, 1.0),
                lr_scheduler.ExponentialLR(o, 0.5),
            ],
            [3, 7],
        ),
        12,
    ),
    "warm-up of a cosine": (
        schedules.cosine(0.5, 12, warmup=4),
        lambda o: lr_scheduler.LambdaLR(o, lambda t: (t + 1) / 4 if t < 4 else schedules.cosine(1.0, 8)(t - 4).item()),
        15,
    ),
}


@pytest.mark.parametrize("name", WITH_TORCH)
def test_torch_has_the_same(name: str) -> None:
    ours, theirs, count = WITH_TORCH[name]
    assert rates(ours, count) == pytest.approx(torchs(theirs, count), rel=1e-12, abs=1e-15)


# DeepSpeed 0.19's optimizer rates before each update, to the digits it was recorded with.
GOLDEN: dict[str, tuple[Callable[[Any], Any], list[float]]] = {
    "WarmupLR, log": (schedules.warmup_lr(1.0, 5, compat=True), [0, 0, 0.430677, 0.682606, 0.861353, 1, 1]),
    "WarmupLR, linear": (
        schedules.warmup_lr(1.0, 5, shape="linear", compat=True),
        [0, 0, 0.2, 0.4, 0.6, 0.8, 1],
    ),
    "WarmupDecayLR": (
        schedules.warmup_decay_lr(1.0, 5, 10, shape="linear", compat=True),
        [0, 0, 0.2, 0.4, 0.6, 0.8, 1, 0.8, 0.6, 0.4, 0.2, 0, 0, 0],
    ),
    "WarmupCosineLR": (
        schedules.warmup_cosine_lr(1.0, 4, 10, low=0.2, end=0.1, compat=True),
        [0, 0.2, 0.6, 0.833985, 1, 0.939711, 0.775, 0.55, 0.325, 0.160289, 0.1, 0.1],
    ),
    "OneCycle": (
        schedules.one_cycle(0.1, 1.0, 4, decay=0.5, decay_every=2),
        [0.1, 0.325, 0.55, 0.775, 1, 0.775, 0.55, 0.325, 0.1, 0.08, 0.066667, 0.057143, 0.05],
    ),
    "LRRangeTest": (schedules.range_test(0.1, 2), [0.1, 0.15, 0.2, 0.25]),
    "LRRangeTest, stairs": (schedules.range_test(0.1, 2, stairs=True), [0.1, 0.1, 0.2, 0.2, 0.3]),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_deepspeeds_entries(name: str) -> None:
    schedule, entries = GOLDEN[name]
    assert rates(schedule, len(entries)) == pytest.approx(entries, abs=5e-7)


@pytest.mark.parametrize(
    "make",
    [
        lambda compat: schedules.warmup_lr(1.0, 5, low=0.25, compat=compat),
        lambda compat: schedules.warmup_decay_lr(1.0, 4, 9, low=0.25, shape="linear", compat=compat),
        lambda compat: schedules.warmup_cosine_lr(1.0, 4, 9, low=0.25, compat=compat),
    ],
)
def test_without_compat_no_rate_is_given_twice(make: Callable[[bool], Any]) -> None:
    """The same rates one update earlier; the first of all, which DeepSpeed gives to update 1 too, is update 0's."""
    assert rates(make(False), 12) == rates(make(True), 13)[1:]
    assert float(make(False)(0)) == 0.25 < float(make(False)(1))


def test_a_decay_of_the_cycle_may_be_off() -> None:
    assert rates(schedules.one_cycle(0.25, 1.0, 2), 7)[4:] == [0.25, 0.25, 0.25]


@pytest.mark.parametrize("name", [*WITH_TORCH, *GOLDEN])
def test_a_staged_step_uses_the_rates(name: str) -> None:
    """With the gradient 1 the parameter falls by the rate of each step."""
    schedule = WITH_TORCH[name][0] if name in WITH_TORCH else GOLDEN[name][0]
    train = fp.train_step(lambda w, x: (w * x).mean(), fp.optim.sgd(schedule), Mesh(data=2), fp.zero(1, "data"))
    state = train.init(torch.zeros((), dtype=torch.float64))
    for _ in range(6):
        state, _ = train(state, torch.ones(2, dtype=torch.float64))
    assert train.params(state).item() == pytest.approx(-sum(rates(schedule, 6)), rel=1e-12)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: schedules.linear(1.0, 0.0, 0), "schedules.linear: it takes a number of steps of at least 1, not 0"),
        (lambda: schedules.cosine(1.0, 4, warmup=4), "at least 1, not 0"),
        (lambda: schedules.warmup_lr(1.0, 2.5), "not 2.5"),  # type: ignore[arg-type]
        (lambda: schedules.warmup_lr(1.0, 5, shape="cubic"), "'log' or 'linear', not 'cubic'"),
    ],
)
def test_what_makes_no_schedule_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
