"""A loss or gradient that is NaN or infinite stops a run, names a parameter, and can be replayed op by op."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.training import finite
from sharding_specs import Mesh

from ..processes import run_on_processes

PLANS: dict[str, tuple[Mesh, Any]] = {
    "no plan": (Mesh(), None),
    "zero 3": (Mesh(data=2), fp.zero(3, "data")),
    "accumulate": (Mesh(data=2), fp.chain(fp.zero(1, "data"), fp.accumulate(2))),
    "pipeline": (Mesh(pipe=2), fp.pipeline("pipe", schedule="1f1b", microbatches=2)),
}


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    hidden = fp.stage_boundary(torch.tanh(x * params["a"]))
    return (torch.log(x.abs()) + hidden @ params["b"]).mean()


def parameters() -> dict[str, torch.Tensor]:
    return {"a": torch.linspace(0.1, 0.5, 4).double(), "b": torch.ones(4, 4).double()}


def batches(bad: float) -> list[torch.Tensor]:
    """Return three batches, of which the second has one bad element, in its last row."""
    found = [torch.linspace(1, 2, 32).reshape(8, 4).double() for _ in range(3)]
    found[1][-1, -1] = bad
    return found


def stepped(train: Any, state: Any, x: torch.Tensor) -> tuple[Any, Any]:
    """Take a step and read its state. A device reports a step when its state is read, or with the next step."""
    state, metrics = train(state, x)
    train.params(state)
    return state, metrics


def run(name: str, bad: float, **options: Any) -> tuple[str, Any, Any]:
    """Train; return the error's text, or "", and what a replay of the second step finds."""
    mesh, plan = PLANS[name]
    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan, **options)
    state, xs = train.init(parameters()), batches(bad)
    losses = []
    state, metrics = train(state, xs[0])
    before = train.copy(state)
    try:
        for x in xs[1:]:
            state, metrics = stepped(train, state, x)
            losses.append(metrics.loss.item())
    except fp.NonFiniteError as error:
        assert error.step == 1 and error.state.step == 2 and not math.isfinite(error.metrics.loss)
        return str(error), str(train.replay(before, xs[1])), error.parameter
    return "", losses, None


def on_ranks(rank: int, name: str, bad: float) -> tuple[str, Any, Any]:
    return run(name, bad)


# -----------------------------------------------------------------------------
# What stops
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_an_infinite_loss_stops_at_its_step(name: str) -> None:
    """log 0 makes the loss −∞ while every gradient is finite."""
    text, origin, parameter = run(name, 0.0)
    assert text.startswith("step 1 is not finite: loss -inf")
    assert "all 2 parameters are finite after it" in text and parameter is None
    assert "train.replay(state, *batch)" in text and 'nonfinite="continue"' in text
    assert origin.startswith("aten.log.default at") and "torch.log(x.abs())" in origin


@pytest.mark.parametrize("name", PLANS)
def test_a_gradient_that_is_not_a_number_names_the_parameter(name: str) -> None:
    text, origin, parameter = run(name, math.inf)
    assert text.startswith("step 1 is not finite: loss inf")
    assert parameter == "a" and "the first parameter that is not finite after it is a (1 of 2 are not)" in text
    assert origin is not None


@pytest.mark.parametrize("name", ["zero 3", "pipeline"])
def test_real_ranks_stop_in_the_same_step(name: str) -> None:
    alone = run(name, 0.0)
    for text, origin, parameter in run_on_processes(on_ranks, 2, name, 0.0):
        assert text == alone[0] and parameter == alone[2]
        assert origin.startswith("aten.log.default at") and "torch.log(x.abs())" in origin
        assert "on rank 1" in origin, "the last row is on rank 1; in a pipeline the second stage adds the logarithm"


def test_an_asynchronous_pipeline_stops_too() -> None:
    def product(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        hidden = fp.stage_boundary(x * params["a"])
        return torch.log((hidden @ params["b"]).abs()).mean()

    plan = fp.pipeline("pipe", schedule="pipedream", microbatches=2)
    train = fp.train_step(product, fp.optim.sgd(0.1), Mesh(pipe=2), plan)
    x = torch.ones(8, 4).double()
    state, _ = train(train.init(parameters()), x)
    x[-1] = 0.0
    with pytest.raises(fp.NonFiniteError, match="step 1 is not finite: loss -inf; the first parameter") as caught:
        stepped(train, train.copy(state), x)
    assert caught.value.parameter == "a"
    origin = train.replay(state, x)
    assert origin is not None and origin.op == "aten.log.default"


def test_a_run_may_go_on() -> None:
    text, losses, _ = run("zero 3", 0.0, nonfinite="continue")
    assert text == "" and math.isinf(losses[0]) and math.isfinite(losses[1])


def test_a_state_that_is_kept_is_what_the_message_names() -> None:
    assert "take the state that was given to step 1," in run("zero 3", 0.0, donate=False)[0]
    assert "make the state before step 1 again, from what was saved" in run("zero 3", 0.0)[0]


def test_an_unknown_policy() -> None:
    with pytest.raises(ValueError, match=r"nonfinite='ignore'\): it is 'error', .* or 'continue'"):
        fp.train_step(loss, fp.optim.sgd(0.1), Mesh(), nonfinite="ignore")


# -----------------------------------------------------------------------------
# Devices: a flag is looked at one step later
# -----------------------------------------------------------------------------


class OnADevice:
    """A copied flag, without a device."""

    def synchronize(self) -> None:
        pass


def test_a_device_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step itself returns; the next one stops, and so does a reading of the state after the last one."""
    made = lambda step, metrics, good: finite.Watched(step, metrics, good, OnADevice())  # noqa: E731
    monkeypatch.setattr(finite, "_copied", made)
    monkeypatch.setattr(finite, "_is_in_main_memory", lambda metrics: False)
    mesh, plan = PLANS["zero 3"]
    train, xs = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan), batches(0.0)
    state, _ = train(train.init(parameters()), xs[0])
    state, metrics = train(state, xs[1])
    assert math.isinf(metrics.loss)
    last = train.copy(state)
    with pytest.raises(fp.NonFiniteError, match="step 1 is not finite"):
        train(state, xs[2])
    with pytest.raises(fp.NonFiniteError, match="step 1 is not finite"):
        train.params(last)
    assert torch.isfinite(train.params(last)["a"]).all(), "what was reported once can be read"


# -----------------------------------------------------------------------------
# float16
# -----------------------------------------------------------------------------


def scaled(rules: fp.LossScale, bad: list[float], **options: Any) -> list[bool]:
    plan = fp.chain(fp.mixed_precision("fp16", loss_scale=rules), fp.data_parallel("data"))
    train = fp.train_step(lambda w, x: (x @ w).square().mean(), fp.optim.sgd(0.1), Mesh(data=2), plan, **options)
    state, skipped = train.init(torch.ones(4)), []
    for value in bad:
        state, metrics = train(state, torch.full((4, 4), value))
        skipped.append(bool(metrics.skipped))
    assert torch.isfinite(train.params(state)).all()
    return skipped


def test_a_skipped_step_is_legal_and_overflow_at_the_lowest_scale_is_not() -> None:
    rules = fp.LossScale(initial=4.0, hysteresis=1)
    assert scaled(rules, [0.1, 6e4, 6e4, 0.1]) == [False, True, True, False]
    with pytest.raises(fp.LossScaleError, match="overflow at the lowest loss scale"):
        scaled(rules, [6e4] * 4)
    assert scaled(rules, [6e4] * 4, nonfinite="continue") == [True] * 4
    assert scaled(fp.LossScale.like_megatron(4.0, hysteresis=1), [6e4] * 6) == [True] * 6, "as its rules say"


# -----------------------------------------------------------------------------
# Replays
# -----------------------------------------------------------------------------


def masked(w: torch.Tensor, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = (x @ w).masked_fill(mask, -torch.inf)
    return torch.softmax(scores, -1).square().sum(-1).mean()


def test_a_mask_is_not_the_origin_but_the_op_that_makes_a_nan_of_it() -> None:
    train = fp.train_step(masked, fp.optim.sgd(0.1), Mesh(data=2), fp.data_parallel("data"))
    state, x, mask = train.init(torch.eye(4)), torch.ones(4, 4), torch.eye(4, dtype=torch.bool)
    assert train.replay(state, x, mask) is None
    mask[2] = True  # a row without a key
    origin = train.replay(state, x, mask)
    assert origin is not None and "softmax" in origin.op and origin.rank == 1
    assert "torch.softmax(scores, -1)" in origin.source and origin.values == "4 NaN of 8 values"
    _, metrics = train(state, x, ~mask & False)
    assert torch.isfinite(metrics.loss), "the state can be used on, and no step was taken"


def test_inputs_that_are_not_finite() -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(3, "data"))
    bad = parameters()
    bad["b"][1, 1] = torch.nan
    with pytest.raises(ValueError, match=r"b is not finite before step 0 \(1 of 2 parameters are not\)"):
        train.replay(train.init(bad), batches(0.0)[0])
    with pytest.raises(ValueError, match=r"0 of the batch has a NaN on rank 0"):
        train.replay(train.init(parameters()), batches(torch.nan)[1])
