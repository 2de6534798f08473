"""Results that are the same on every data rank, or for every microbatch, though they lie split over these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.schedules import Schedule
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from ..some_cases import one_in
from ..trees import assert_equal
from .networks import assert_close, batch, kinds, made, network, normal, parameters, pipeline, plans
from .work import idle_gradients

shapes = st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=3)


@settings(max_examples=6)
@given(plans(most_ranks=3), kinds, st.integers(0, 3), st.sampled_from([1, 2, 4]), shapes, st.integers(0, 1000))
def test_their_gradients_are_zero(
    schedule: Schedule, contents: list[str], stage: int, ranks: int, unused: list[list[int]], seed: int
) -> None:
    contents = (contents * schedule.depth)[: max(schedule.depth, len(contents))]
    loss, params = network(contents), parameters(contents, seed)
    params["unused"] = [torch.ones(shape, dtype=torch.float64) for shape in unused]
    data = batch(ranks * schedule.microbatches, seed)
    plan, mesh = fp.chain(fp.zero(stage, "data"), pipeline(schedule)), Mesh(pipe=schedule.ranks, data=ranks)
    found = fp.compile(fp.grad_and_value(plan(loss)), mesh)(params, *data)
    assert_equal(found, fp.grad_and_value(loss)(params, *data))
    assert not any(gradient.any() for gradient in found[0]["unused"])


@pytest.mark.parametrize("stage", range(4))
def test_a_whole_one_and_a_sharded_one_of_a_size(stage: int) -> None:
    """Their gradients are one value, zeros of a shape, which lies in two ways."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return ((torch.tanh(x @ params["a"]) @ params["b"]) ** 2).sum()

    params = {"a": normal(2, 2), "b": normal(2, 2), "sharded": normal(4, 3), "whole": normal(2, 3)}
    specs = {"a": P("data"), "b": P(), "sharded": P("data"), "whole": P()}
    plan = fp.chain(fp.zero(stage, "data", specs), fp.pipeline("pipe", microbatches=2))
    x = normal(4, 2)
    got = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=2, data=2))(params, x)
    assert_close(got, fp.grad_and_value(loss)(params, x))


@pytest.mark.parametrize("stage", range(4))
def test_without_a_derivative(stage: int) -> None:
    """Used, but behind a step function or cut off: their gradients are sums of zeros."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        h = torch.tanh(x @ params["a"] + params["floored"].floor()) @ params["b"]
        return (h * params["cut"].detach() + params["sign"].sign()).sum()

    params = {"a": normal(2, 2), "b": normal(2, 2), "floored": normal(2), "cut": normal(2), "sign": normal(4, 1, 2)}
    plan = fp.chain(fp.zero(stage, "data"), fp.pipeline("pipe", microbatches=2))
    x = normal(4, 2)
    got = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=2, data=2))(params, x)
    assert_close(got, fp.grad_and_value(loss)(params, x))


@one_in(3, kind=["pipeline", "accumulate"], microbatches=[1, 2, 3], zero=[0, 2])
def test_results_per_sample_that_no_sample_decides(kind: str, microbatches: int, zero: int) -> None:
    def loss(params: list[Tensor], x: Tensor) -> tuple[Tensor, Any]:
        h = x
        for w in params:
            h = torch.tanh(h @ w)
        ones, rows = torch.ones_like(h[:, 0]), params[0][0].expand(len(x), 3)
        return h.sum(), {"h": h, "zeros": torch.zeros_like(h), "ones": ones, "rows": rows, "odd": torch.arange(len(x))}

    transforms = {
        "pipeline": (fp.pipeline("pipe", microbatches=microbatches), Mesh(pipe=2, data=2)),
        "accumulate": (fp.accumulate(microbatches), Mesh(data=2)),
    }
    params, x = [normal(3, 3) for _ in range(4)], normal(8, 3)
    plan, mesh = fp.chain(fp.zero(zero, "data"), transforms[kind][0]), transforms[kind][1]
    got = fp.compile(fp.grad_and_value(plan(loss), has_aux=True), mesh)(params, x)
    assert_close(got, fp.grad_and_value(loss, has_aux=True)(params, x))


@one_in(2, name=["1f1b", "zb-v"], stage=range(4))
def test_training_leaves_them_as_they_are(name: str, stage: int) -> None:
    def loss(params: dict[str, Any], x: Tensor) -> Tensor:
        for w in params["layers"]:
            x = torch.tanh(x @ w)
        return (x**2).mean()

    params = {"layers": [normal(2, 2) for _ in range(4)], "unused": normal(3, 5)}
    plan, x = fp.chain(fp.zero(stage, "data"), pipeline(made(name, 2, 4))), normal(8, 2)
    train = fp.train_step(loss, fp.optim.adamw(1e-2, weight_decay=0.1), Mesh(pipe=2, data=2), plan, clip=0.5)
    state = train.init(params)
    with pytest.warns(fp.NotTrainedWarning, match=r"no gradient reaches `unused`"):
        state, _ = train(state, x)
    for _ in range(2):
        state, _ = train(state, x)
    assert "no gradient reaches unused" in train.program.notes
    trained = train.params(state)
    assert torch.equal(trained["unused"], params["unused"])
    assert not torch.equal(trained["layers"][0], params["layers"][0])


def test_on_processes() -> None:
    wanted = idle_gradients(0)
    for found in run_on_processes(idle_gradients, 4):
        assert_equal(found, wanted)
