"""What a loss needs of all data ranks is summed once per step, however many microbatches and stages."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..passes.networks import batch, integer_loss, loss, parameters
from ..processes import run_on_processes

MICROBATCHES = 4


def weighted(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean over what a mask keeps, so that a count is wanted before the backward begins."""
    for layer in params["layers"]:
        x = x + torch.relu(x @ layer["a"]) @ layer["b"]
    found, kept = (x @ params["head"]).square().sum(1), (y >= 0).to(x.dtype)
    return (found * kept).sum() / kept.sum()


# per loss: sums before the pipeline fills, on every rank of the pipeline; sums after it has drained, on the last
SUMS = {weighted: (1, 1), loss: (1, 1), integer_loss: (0, 1)}


def scalar_sums(program: Any) -> list[Any]:
    return [
        one for one in program.collectives() if (one.kind, one.axes) == ("psum", ("data",)) and not one.operand.ndim
    ]


@pytest.mark.parametrize("f", SUMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("transform", [fp.data_parallel("data"), fp.zero(2, "data"), fp.zero(3, "data")], ids=str)
@pytest.mark.every(3)
def test_pipelines(f: Any, ranks: int, transform: Any) -> None:
    plan = fp.chain(transform, fp.pipeline("pipe", microbatches=MICROBATCHES))
    program = fp.compile(fp.grad_and_value(plan(f)), Mesh(pipe=ranks, data=2)).lower(parameters(4), *batch(32))
    early, late = SUMS[f]
    counts = program.counts().get(("psum", ("data",)), 0)
    gradients = len(optree.tree_leaves(parameters(4))) if "data_parallel" in str(transform) else 0
    assert counts == gradients + early * ranks + late
    assert not program.per_microbatch().keys() & {("psum", ("data",))}


@pytest.mark.parametrize("f", SUMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("reduce", ["once", "each"])
def test_accumulation(f: Any, reduce: str) -> None:
    """A loss is summed once even where gradients are reduced after every microbatch."""
    plan = fp.chain(fp.data_parallel("data"), fp.accumulate(MICROBATCHES, reduce=reduce))
    step = fp.compile(fp.grad_and_value(plan(f)), Mesh(data=2), without=("buckets",))
    assert len(scalar_sums(step.lower(parameters(2), *batch(32)))) == sum(SUMS[f])
    without = fp.compile(fp.grad_and_value(plan(f)), Mesh(data=2), without=("sums once",))
    assert len(scalar_sums(without.lower(parameters(2), *batch(32)))) == MICROBATCHES * sum(SUMS[f])


@pytest.mark.parametrize("length", [pytest.param(32, marks=pytest.mark.slow), 30])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_integers_do_not_show_it(length: int, schedule: str) -> None:
    """Every way to cut the batch, the same integers; 30 samples make microbatches of two lengths."""
    tensor = fp.tensor_parallel("tensor", {"layers/*/a": P(None, "tensor"), "layers/*/b": P("tensor")})
    plan = fp.chain(tensor, fp.data_parallel("data"), fp.pipeline("pipe", schedule=schedule, microbatches=MICROBATCHES))
    params, inputs = parameters(4, integers=True), batch(length, integers=True)
    found = fp.compile(fp.grad_and_value(plan(integer_loss)), Mesh(pipe=2, data=2, tensor=2))(params, *inputs)
    wanted = torch.func.grad_and_value(integer_loss)(params, *inputs)
    assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(wanted)))


def test_the_bits_of_the_same_microbatches_without_a_pipeline() -> None:
    params, inputs = parameters(4), batch(32)
    piped = fp.chain(fp.data_parallel("data"), fp.pipeline("pipe", microbatches=MICROBATCHES))
    alone = fp.chain(fp.data_parallel("data"), fp.accumulate(MICROBATCHES))
    found = fp.compile(fp.grad_and_value(piped(loss)), Mesh(pipe=2, data=2))(params, *inputs)
    wanted = fp.compile(fp.grad_and_value(alone(loss)), Mesh(data=2))(params, *inputs)
    assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(wanted)))


def what_comes_beside(params: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value = weighted(params, x, y)
    return value, value.square()


def test_a_sum_that_is_used_twice() -> None:
    """The value and what is made of it."""
    plan = fp.chain(fp.data_parallel("data"), fp.accumulate(2))
    step = fp.compile(fp.grad_and_value(plan(what_comes_beside), has_aux=True), Mesh(data=2))
    grads, (value, aux) = step(parameters(2), *batch(16))
    wanted, (reference, beside) = torch.func.grad_and_value(what_comes_beside, has_aux=True)(parameters(2), *batch(16))
    torch.testing.assert_close((value, aux), (reference, beside), rtol=1e-12, atol=1e-12)
    for a, b in zip(optree.tree_leaves(grads), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def train_on(rank: int, mesh: Mesh) -> list[torch.Tensor]:
    plan = fp.chain(fp.zero(2, "data"), fp.pipeline("pipe", microbatches=MICROBATCHES))
    train = fp.train_step(loss, fp.optim.adamw(1e-2), mesh, plan, reduction="ordered")
    state, losses = train.init(parameters(4)), []
    for _ in range(2):
        state, metrics = train(state, *batch(32))
        losses.append(metrics.loss)
    return [*optree.tree_leaves(train.whole(state)), *losses]


def test_processes() -> None:
    mesh = Mesh(pipe=2, data=2)
    simulated = train_on(0, mesh)
    for found in run_on_processes(train_on, 4, mesh):
        assert all(map(torch.equal, simulated, found))
