"""Delayed updates: equal to their recurrence, and to the optimizer itself until the warm-up ends, under every plan."""

from __future__ import annotations

import cmath
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

from ..processes import run_on_processes
from ..training.test_on_state import PLANS, batch, loss
from ..trees import assert_close, assert_equal
from .test_ema import parameters

OPTIMIZERS = {
    "sgd": fp.optim.sgd(0.1, momentum=0.9),
    "adamw": fp.optim.adamw(0.1),
    "scheduled": fp.optim.adamw(fp.optim.schedules.linear(0.1, 0.0, 6)),
    "adafactor": fp.optim.adafactor(0.1),
    "muon": fp.optim.muon(0.1),
    "clamped": fp.optim.clip_value(fp.optim.sgd(0.1), 0.01),
    "by path": fp.optim.by_path({"w1": fp.optim.sgd(0.1), "*": fp.optim.adamw(0.1)}),
}


@pytest.mark.parametrize("rate", [0.2, 0.25, 0.7])
def test_the_closed_form_on_a_quadratic(rate: float) -> None:
    """For θ²/2 it is θ_(i+1) = θ_i − η θ_(i−1), the sum of powers of the roots of z² − z + η."""
    optimizer = fp.optim.delayed(fp.optim.sgd(rate), after=0)
    w = torch.tensor([3.0], dtype=torch.float64)
    state, seen = optimizer.init(w), [w.item()]
    for _ in range(12):
        w, state = optimizer.update(w, state, w)
        seen.append(w.item())
    half = cmath.sqrt(1 - 4 * rate) / 2
    if half == 0:
        wanted = [3 * (1 + n / 2) * 0.5**n for n in range(12)]  # a double root
    else:
        roots = (0.5 + half, 0.5 - half)
        first = 3 * (1 - rate - roots[1]) / (roots[0] - roots[1])
        wanted = [(first * roots[0] ** n + (3 - first) * roots[1] ** n).real for n in range(12)]
    assert seen[1:] == pytest.approx(wanted, rel=1e-12)  # θ_1 is θ_0


def by_hand(optimizer: Any, after: float, steps: int) -> Any:
    """Return the parameters after some steps of one rank, by the recurrence."""
    params, held = parameters(), None
    state = optimizer.init(params)
    for number in range(steps):
        grads = fp.grad(loss)(params, *batch())
        if number < after:
            params, state = optimizer.update(grads, state, params)
        else:
            if held is not None:
                params, state = optimizer.update(held, state, params)
            held = grads
    return params


@settings(max_examples=3, deadline=None)
@given(plan=st.sampled_from(sorted(PLANS)), name=st.sampled_from(sorted(OPTIMIZERS)), after=st.sampled_from([0, 1, 2]))
def test_the_recurrence_under_every_plan(plan: str, name: str, after: int) -> None:
    how, mesh = PLANS[plan]
    if plan == "flat" and name in ("adafactor", "muon"):
        plan, (how, mesh) = "zero 2", PLANS["zero 2"]
    train = fp.train_step(loss, fp.optim.delayed(OPTIMIZERS[name], after), mesh, how)
    state, before = train.init(parameters()), parameters()
    for steps in range(1, 5):
        state, _ = train(state, *batch())
        if steps == after + 1:
            assert_equal(train.params(state), before)
        before = train.params(state)
    assert_close(before, by_hand(OPTIMIZERS[name], after, 4))


@settings(max_examples=2, deadline=None)
@given(
    stage=st.integers(0, 3),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    after=st.sampled_from([2, math.inf]),
    precise=st.booleans(),
)
def test_the_bits_of_the_optimizer_until_the_warm_up_ends(stage: int, name: str, after: float, precise: bool) -> None:
    """With clipping and masters. An endless warm-up is the optimizer."""
    plan = fp.chain(*([] if precise else [fp.mixed_precision("bf16")]), fp.zero(stage, "data"), fp.accumulate(2))
    seen = []
    for optimizer in (OPTIMIZERS[name], fp.optim.delayed(OPTIMIZERS[name], after)):
        train = fp.train_step(loss, optimizer, Mesh(data=2), plan, clip=0.5)
        state, rows = train.init(parameters()), []
        for _ in range(4):
            state, metrics = train(state, *batch())
            rows.append([train.params(state), metrics.loss, metrics.lr])
        seen.append(rows)
    same = 4 if after == math.inf else 2
    assert_equal(seen[0][:same], seen[1][:same])
    assert same == 4 or not torch.equal(seen[0][2][0]["w1"], seen[1][2][0]["w1"])


@pytest.mark.parametrize("other", ["zero 3", "pipeline"])
def test_saved_and_restored_on_another_mesh(tmp_path: Path, other: str) -> None:
    """In the middle of the delay: the held gradient is a part of the state."""
    optimizer = fp.optim.delayed(fp.optim.adamw(0.1), 1)
    train = fp.train_step(loss, optimizer, PLANS["zero 1"][1], PLANS["zero 1"][0])
    state = train.init(parameters())
    for _ in range(3):
        state, _ = train(state, *batch())
    train.save(state, tmp_path)
    again = fp.train_step(loss, optimizer, PLANS[other][1], PLANS[other][0])
    restored = again.restore(tmp_path)
    assert_equal(again.whole(restored), train.whole(state))
    after, _ = again(restored, *batch())
    assert_close(again.params(after), by_hand(fp.optim.adamw(0.1), 1, 4))


def on_a_rank(rank: int) -> Any:
    how, mesh = PLANS["flat"]
    train = fp.train_step(loss, fp.optim.delayed(fp.optim.adamw(0.1), 1), mesh, how, reduction="ordered")
    state = train.init(parameters())
    for _ in range(4):
        state, _ = train(state, *batch())
    return train.params(state)


def test_on_processes() -> None:
    wanted = on_a_rank(0)
    for found in run_on_processes(on_a_rank, 2):
        assert_equal(found, wanted)


def test_inside_other_optimizers_and_around_them() -> None:
    """One group of two is delayed, an average is taken of delayed updates, and rates are those of the update."""
    rate = fp.optim.schedules.linear(0.1, 0.0, 10)
    inside = fp.optim.by_path({"w1": fp.optim.delayed(fp.optim.sgd(rate), 0), "*": fp.optim.sgd(0.1)})
    around = fp.optim.ema(fp.optim.delayed(fp.optim.sgd(0.1), 0), 0.5)
    how, mesh = PLANS["zero 1"]
    train = fp.train_step(loss, inside, mesh, how)
    state = train.init(parameters())
    state, metrics = train(state, *batch())
    first = train.params(state)
    assert_equal(first["w1"], parameters()["w1"])
    assert not torch.equal(first["w2"], parameters()["w2"])
    _, metrics = train(state, *batch())
    assert metrics.lr["w1"] == 0.1  # of the first update: the step before was none
    train = fp.train_step(loss, around, mesh, how)
    state, seen = train.init(parameters()), []
    for _ in range(3):
        state, _ = train(state, *batch())
        seen.append(train.params(state)["w1"])
    assert_equal(seen[0], parameters()["w1"])
    assert_close(train.params(state, ema=True)["w1"], seen[0] / 4 + seen[1] / 4 + seen[2] / 2)


def test_a_skipped_update_is_made_up() -> None:
    scale = fp.LossScale(2.0**20, hysteresis=1)
    plan = fp.chain(fp.mixed_precision("fp16", loss_scale=scale), fp.zero(1, "data"))
    delayed = fp.optim.delayed(fp.optim.sgd(0.1), 0)
    train = fp.train_step(lambda p, x: (x @ p["w"]).square().mean(), delayed, Mesh(data=2), plan)
    state, x, moved = train.init({"w": torch.ones(2, 2)}), torch.full((4, 2), 4.0), []
    for _ in range(20):
        before = train.params(state)
        state, metrics = train(state, x)
        moved += [] if metrics.skipped else [not torch.equal(train.params(state)["w"], before["w"])]
        assert not metrics.skipped or torch.equal(train.params(state)["w"], before["w"])
        if len(moved) == 2:
            break
    assert moved == [False, True]


def test_a_gradient_more_in_the_state() -> None:
    params: dict[str, Tensor] = {"w": torch.ones(4, 2), "n": torch.arange(3)}
    optimizer = fp.optim.delayed(fp.optim.sgd(0.1), 3)
    train = fp.train_step(lambda p, x: (x @ p["w"]).sum(), optimizer, Mesh(data=2), fp.zero(1, "data"))
    form = train.init(params).layout
    assert form.trees(list(form.specs))[1].gradient["w"].axes == frozenset({"data"})


def test_bad_input() -> None:
    for after in (-1, 1.5, "40", float("nan")):
        with pytest.raises(ValueError, match=r"delayed\(after=.*\): give the number of updates before the delay"):
            fp.optim.delayed(fp.optim.sgd(0.1), after)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"delayed takes an fp.optim.Optimizer, not 0.1"):
        fp.optim.delayed(0.1)  # type: ignore[arg-type]
