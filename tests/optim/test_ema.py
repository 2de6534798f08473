"""Average of the parameters: that of torch's AveragedModel, sharded, saved and restored as a part of the state."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import functional_parallel as fp
from sharding_specs import Mesh

from ..processes import run_on_processes
from ..training import test_on_state
from ..training.test_on_state import PLANS, batch, loss, predict
from ..trees import assert_close, assert_equal


def parameters() -> dict[str, Tensor]:
    return {name: leaf for name, leaf in test_on_state.parameters().items() if name != "name"}


def by_hand(optimizer: Any, decay: Callable[[int], float], steps: int) -> tuple[Any, Any]:
    """Return the parameters and their average after some steps of one rank."""
    params = parameters()
    state, average = optimizer.init(params), params
    for number in range(steps):
        params, state = optimizer.update(fp.grad(loss)(params, *batch()), state, params)
        factor = decay(number) if number else 0.0
        average = {name: factor * average[name] + (1 - factor) * params[name] for name in params}
    return params, average


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("optimizer", [fp.optim.sgd(0.1, momentum=0.9), fp.optim.adamw(0.1)], ids=["sgd", "adamw"])
def test_under_every_plan(plan: str, optimizer: Any) -> None:
    how, mesh = PLANS[plan]
    train = fp.train_step(loss, fp.optim.ema(optimizer, 0.75), mesh, how)
    evaluate = train.compile(how(predict), ema=True)
    state = train.init(parameters())
    assert_equal(train.params(state, ema=True), parameters())
    x, y = batch()
    for steps in range(1, 4):
        state, _ = train(state, x, y)
        params, average = by_hand(optimizer, lambda _: 0.75, steps)
        assert_close(train.params(state), params)
        assert_close(train.params(state, ema=True), average)
        assert_close(evaluate(state, x), predict(average, x))
        assert_close(train.compile(how(predict))(state, x), predict(params, x))


def on_a_rank(rank: int, plan: str) -> list[Any]:
    how, mesh = PLANS[plan]
    train = fp.train_step(loss, fp.optim.ema(fp.optim.adamw(0.1), 0.75), mesh, how, reduction="ordered")
    state = train.init(parameters())
    for _ in range(2):
        state, _ = train(state, *batch())
    return [train.params(state, ema=True), train.compile(how(predict), ema=True)(state, batch()[0])]


@pytest.mark.parametrize("plan", ["flat", "pipeline"])
def test_on_processes(plan: str) -> None:
    wanted = on_a_rank(0, plan)
    for found in run_on_processes(on_a_rank, PLANS[plan][1].size, plan):
        assert_equal(found, wanted)


# --- torch's average ---


@settings(max_examples=10, deadline=None)
@given(
    decay=st.floats(0, 1),
    sgd=st.booleans(),
    plan=st.sampled_from([fp.data_parallel("data"), fp.zero(2, "data", layout="flat"), fp.zero(3, "data")]),
)
def test_the_average_of_torch(decay: float, sgd: bool, plan: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    reference = copy.deepcopy(net)

    def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
        made = module.parameters()
        return torch.optim.SGD(made, 0.1, momentum=0.9) if sgd else torch.optim.AdamW(made, 0.1)

    step = fp.prepare(net, optimizer_of(net), loss=square, mesh=Mesh(data=2), plan=plan, ema=decay)
    evaluate, optimizer = step.eval(lambda model, x: model(x), ema=True), optimizer_of(reference)
    average = AveragedModel(reference, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for x in torch.randn(4, 4, 3).double():
        step(x)
        optimizer.zero_grad()
        square(reference, x).backward()
        optimizer.step()
        average.update_parameters(reference)
        torch.testing.assert_close(evaluate(x), average(x).detach(), rtol=0, atol=1e-10)
    before = [each.clone() for each in net.parameters()]
    averaged = step.module(ema=True)
    for mine, theirs in zip(averaged.parameters(), average.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)
    assert averaged is not net and all(map(torch.equal, before, net.parameters()))


def square(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize(
    "decay", [lambda n: min(0.9, n / (n + 2)), lambda n: 0.5 if n < 2 else 0.75, lambda n: 1 - math.exp(-int(n))]
)
def test_a_decay_by_schedule(decay: Callable[[Any], float]) -> None:
    """A function of tensors, and functions that a trace cannot follow."""
    how, mesh = PLANS["zero 2"]
    train = fp.train_step(loss, fp.optim.ema(fp.optim.sgd(0.1), wrapped(decay)), mesh, how)
    state = train.init(parameters())
    for _ in range(4):
        state, _ = train(state, *batch())
    assert_close(train.params(state, ema=True), by_hand(fp.optim.sgd(0.1), decay, 4)[1])


def wrapped(decay: Callable[[Any], float]) -> Callable[[Any], float]:
    return decay if decay(3) != min(0.9, 3 / 5) else lambda n: (n / (n + 2)).clamp(max=0.9)


# --- What is averaged ---


def test_the_average_of_masters() -> None:
    """Averages of rounded parameters would not move by less than a rounding error."""
    params = {"w": torch.randn(4, 4)}
    plan = fp.chain(fp.mixed_precision("bf16"), fp.zero(1, "data"))
    train = fp.train_step(lambda p, x: (x @ p["w"]).square().mean(), fp.optim.ema(fp.optim.sgd(1e-4), 0.5), MESH, plan)
    state, x = train.init(params), torch.randn(4, 4)
    averages = []
    for _ in range(3):
        state, _ = train(state, x)
        averages.append(train.params(state)["w"])
    found = train.params(state, ema=True)["w"]
    assert found.dtype == torch.float32 and not torch.equal(found, found.bfloat16().float())
    torch.testing.assert_close(found, averages[0] / 4 + averages[1] / 4 + averages[2] / 2, rtol=1e-6, atol=1e-7)
    predicted = train.compile(plan(lambda p, x: x @ p["w"]), ema=True)(state, x)
    torch.testing.assert_close(predicted, (x.bfloat16() @ found.bfloat16()).float(), rtol=1e-2, atol=1e-2)


MESH = Mesh(data=2)


def test_a_skipped_update_is_not_averaged() -> None:
    scale = fp.LossScale(2.0**20, hysteresis=1)
    plan = fp.chain(fp.mixed_precision("fp16", loss_scale=scale), fp.zero(1, "data"))
    train = fp.train_step(lambda p, x: (x @ p["w"]).square().mean(), fp.optim.ema(fp.optim.sgd(0.1), 0.5), MESH, plan)
    state, x, skips = train.init({"w": torch.ones(2, 2)}), torch.full((4, 2), 4.0), 0
    for _ in range(20):
        before = train.params(state, ema=True)
        state, metrics = train(state, x)
        assert metrics.skipped is not None
        if metrics.skipped:
            skips += 1
            assert_equal(train.params(state, ema=True), before)
        else:
            assert_equal(train.params(state, ema=True), train.params(state))  # the first update is copied
            break
    assert skips and not metrics.skipped


def test_complex_frozen_and_other_leaves() -> None:
    params = {
        "c": torch.randn(3, dtype=torch.complex128),
        "fixed": torch.randn(3).double(),
        "n": torch.arange(3),
        "s": "x",
    }
    optimizer = fp.optim.ema(fp.optim.by_path({"c": fp.optim.sgd(0.1), "*": None}), 0.5)
    train = fp.train_step(lambda p, x: ((x * p["c"]).abs() * p["fixed"]).sum(), optimizer, MESH, fp.zero(1, "data"))
    state, x = train.init(params), torch.randn(4, 3).double()
    seen = []
    for _ in range(2):
        state, metrics = train(state, x)
        seen.append(train.params(state)["c"])
    average = train.params(state, ema=True)
    torch.testing.assert_close(average["c"], (seen[0] + seen[1]) / 2)
    assert_equal([average["fixed"], average["n"]], [params["fixed"], params["n"]])
    assert average["s"] == "x"
    assert metrics.lr == {"c": torch.tensor(0.1, dtype=torch.float64)}


# --- Saved and restored ---


@pytest.mark.parametrize("other", ["zero 3", "flat", "tensor, zero 3"])
def test_restored_on_another_mesh(tmp_path: Path, other: str) -> None:
    optimizer = fp.optim.ema(fp.optim.adamw(0.1), 0.75)
    train = fp.train_step(loss, optimizer, PLANS["zero 1"][1], PLANS["zero 1"][0])
    state = train.init(parameters())
    for _ in range(2):
        state, _ = train(state, *batch())
    train.save(state, tmp_path)
    again = fp.train_step(loss, optimizer, PLANS[other][1], PLANS[other][0])
    restored = again.restore(tmp_path)
    assert_equal(again.params(restored, ema=True), train.params(state, ema=True))
    after, _ = again(restored, *batch())
    assert_close(again.params(after, ema=True), by_hand(fp.optim.adamw(0.1), lambda _: 0.75, 3)[1])
    assert_equal(again.params(again.load(*train.whole(state), state.step), ema=True), train.params(state, ema=True))


def test_begun_from_a_function_leaf_by_leaf() -> None:
    """A recording of it, without the warning that the function ran as it is."""
    train = fp.train_step(lambda p, x: (x @ p["w"]).sum(), fp.optim.ema(fp.optim.sgd(0.1)), MESH, fp.zero(3, "data"))
    state = train.init(lambda: {"w": torch.randn(600, 600)})
    assert_equal(train.params(state, ema=True), train.params(state))


def test_each_rank_holds_a_shard_of_the_average() -> None:
    how, mesh = PLANS["zero 1"]
    train = fp.train_step(loss, fp.optim.ema(fp.optim.sgd(0.1)), mesh, how)
    form = train.init(parameters()).layout
    specs = form.trees(list(form.specs))[1].average
    assert specs["w1"].axes == specs["w2"].axes == frozenset({"data"})


# --- Refusals ---


def test_what_is_no_average() -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1), MESH, fp.data_parallel("data"))
    state = train.init(parameters())
    with pytest.raises(
        ValueError, match=r"ema=True takes the average .* Optimizer\(sgd\) has none: give train_step fp.op"
    ):
        train.params(state, ema=True)
    with pytest.raises(ValueError, match=r"Optimizer\(sgd\) has none"):
        train.compile(fp.data_parallel("data")(predict), ema=True)(state, batch()[0])
    inside = fp.optim.by_path({"w1": fp.optim.ema(fp.optim.sgd(0.1)), "*": None})
    train = fp.train_step(loss, inside, MESH, fp.data_parallel("data"))
    with pytest.raises(ValueError, match="around the optimizer of all parameters"):
        train.params(train.init(parameters()), ema=True)
    replicas = fp.train_step(loss, fp.optim.ema(fp.optim.sgd(0.1)), MESH, fp.local_sgd("data", inner=2))
    with pytest.raises(ValueError, match="each replica has its own average"):
        replicas.params(replicas.init(parameters()), ema=True)


def test_a_decay_or_an_optimizer_that_is_none() -> None:
    for decay in (1.5, -0.1, "0.9"):
        with pytest.raises(ValueError, match=r"ema\(decay=.*\): give a number from 0 to 1"):
            fp.optim.ema(fp.optim.sgd(0.1), decay)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"ema takes an fp.optim.Optimizer, not 0.1"):
        fp.optim.ema(0.1)  # type: ignore[arg-type]
