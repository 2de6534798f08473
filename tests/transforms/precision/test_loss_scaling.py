"""The loss scaler is DeepSpeed's, Megatron's and torch's, step by step; and its update is staged like any function."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.errors import LossScaleError
from functional_parallel.requests.loss_scaling import LossScale, LossScaleState
from sharding_specs import Mesh, P


def trace(rules: LossScale, steps: Iterable[bool]) -> list[tuple[float, int]]:
    """(scale, hysteresis left) after each step; a step that ends training ends the list."""
    state, found = rules.init(), []
    for overflow in steps:
        state = rules.update(state, torch.tensor(overflow))
        try:
            rules.check(state)
        except LossScaleError:
            return found
        found.append((state.scale.item(), state.patience.item()))
    return found


# -----------------------------------------------------------------------------
# Recorded traces of DeepSpeed 0.19: initial 16, window 2, minimum 1; X is an overflow
# -----------------------------------------------------------------------------

GOLDEN: dict[str, tuple[dict[str, bool], list[tuple[float, int]]]] = {
    "X" * 7: ({}, [(16, 1), (8, 1), (4, 1), (2, 1), (1, 1)]),
    "X.X.X.X.": ({}, [(16, 1), (16, 1), (8, 1), (8, 1), (4, 1), (4, 1), (2, 1), (2, 1)]),
    "X.X.X.": ({"consecutive_hysteresis": True}, [(16, 1), (16, 2)] * 3),
}
SCALES = {"..........": [16, 16, 32, 32, 64, 64, 128, 128, 256, 256], "XX...XX...": [16, 8, 8, 8, 16, 16, 8, 8, 8, 16]}


@pytest.mark.parametrize("steps", GOLDEN)
def test_deepspeeds_traces(steps: str) -> None:
    options, entries = GOLDEN[steps]
    assert trace(LossScale(16.0, 2, **options), [step == "X" for step in steps]) == entries


@pytest.mark.parametrize("steps", SCALES)
def test_deepspeeds_scales(steps: str) -> None:
    found = trace(LossScale(16.0, 2), [step == "X" for step in steps])
    assert [scale for scale, _ in found] == SCALES[steps]


def test_the_defaults_are_deepspeeds() -> None:
    rules = LossScale()
    assert (rules.initial, rules.window, rules.hysteresis, rules.minimum) == (2**16, 1000, 2, 1)


# -----------------------------------------------------------------------------
# Against plain Python, over random runs
# -----------------------------------------------------------------------------


def deepspeed(rules: LossScale, steps: list[bool]) -> list[tuple[float, int]]:
    """The rules in DeepSpeed's own terms: the number of a step and of the last one that overflowed."""
    scale, left, last, found = rules.initial, rules.hysteresis, -1, []
    for number, overflow in enumerate(steps):
        if overflow:
            if left == 1 and scale == rules.minimum:
                return found
            if left == 1:
                scale = max(scale / rules.factor, rules.minimum)
            else:
                left -= 1
            last = number
        else:
            if rules.consecutive_hysteresis:
                left = rules.hysteresis
            stable = number - last - 1
            if stable > 0 and stable % rules.window == 0:
                left, scale = rules.hysteresis, scale * rules.factor
        found.append((scale, left))
    return found


def megatron(rules: LossScale, steps: list[bool]) -> list[float]:
    """The rules in Megatron-LM's terms: one counter for growth, one, which may fall below zero, for hysteresis."""
    scale, growth, left, found = rules.initial, 0, rules.hysteresis, []
    for overflow in steps:
        if overflow:
            growth, left = 0, left - 1
            if left <= 0:
                scale = max(scale / rules.factor, rules.minimum)
        else:
            growth += 1
            if growth == rules.window:
                growth, left, scale = 0, rules.hysteresis, scale * rules.factor
        found.append(scale)
    return found


runs = st.lists(st.sampled_from([True, False, False, False]), max_size=40)


@settings(max_examples=200)
@given(
    runs, st.integers(1, 5), st.integers(1, 4), st.sampled_from([2.0, 3.0]), st.sampled_from([1.0, 0.25]), st.booleans()
)
def test_it_is_deepspeeds_over_random_runs(
    steps: list[bool], window: int, hysteresis: int, factor: float, minimum: float, consecutive: bool
) -> None:
    rules = LossScale(16.0, window, hysteresis, minimum, factor, consecutive)
    assert trace(rules, steps) == deepspeed(rules, steps)


@settings(max_examples=100)
@given(runs, st.integers(1, 5), st.integers(1, 4))
def test_it_is_megatrons_over_random_runs(steps: list[bool], window: int, hysteresis: int) -> None:
    rules = LossScale.like_megatron(16.0, window, hysteresis)
    assert [scale for scale, _ in trace(rules, steps)] == megatron(rules, steps)


@settings(max_examples=100)
@given(runs, st.integers(1, 5))
def test_it_is_torchs_over_random_runs(steps: list[bool], window: int) -> None:
    """Against the kernel inside `torch.amp.GradScaler`, which updates in place."""
    scale, growth, found = torch.tensor(16.0), torch.tensor(0, dtype=torch.int32), []
    for overflow in steps:
        torch._amp_update_scale_(scale, growth, torch.tensor(float(overflow)), 2.0, 0.5, window)
        found.append(scale.item())
    assert [s for s, _ in trace(LossScale.like_torch(16.0, window), steps)] == found


# -----------------------------------------------------------------------------
# In a program
# -----------------------------------------------------------------------------


def test_an_overflow_on_one_rank_is_one_on_all() -> None:
    rules = LossScale(16.0, 2, hysteresis=1)

    def step(state: LossScaleState, gradient: torch.Tensor) -> LossScaleState:
        overflow = fp.psum((~gradient.isfinite().all()).to(torch.int64), "data") > 0
        return rules.update(state, overflow)

    mapped = fp.shard_map(Mesh(data=4), in_specs=(P(), P("data")), out_specs=P())(step)
    gradient = torch.zeros(4)
    clean = mapped(rules.init(), gradient)
    gradient[2] = float("nan")
    assert clean.scale.item() == 16 and mapped(clean, gradient).scale.item() == 8
    assert mapped(clean, gradient).clean.item() == 0, "one gathered answer: all ranks have the same"


def test_the_minimum_says_what_to_do() -> None:
    rules = LossScale(2.0, hysteresis=1)
    state = rules.update(rules.update(rules.init(), torch.tensor(True)), torch.tensor(True))
    with pytest.raises(LossScaleError, match=r"lowest loss scale, 1.*bfloat16"):
        rules.check(state)


@pytest.mark.parametrize(
    "options",
    [
        *({"window": 0}, {"hysteresis": 0}, {"factor": 1.0}, {"initial": 0.5}, {"window": 2.5}, {"hysteresis": True}),
        *({"initial": float("inf")}, {"factor": float("inf")}, {"initial": "16"}),
    ],
)
def test_numbers_that_make_no_scale_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="are needed"):
        LossScale(**options)  # type: ignore[arg-type]
