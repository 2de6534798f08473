"""A pipelined function equals the function: exactly, whatever the schedule, the cut and what the stages contain."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.schedules import Schedule
from sharding_specs import Mesh

from ..trees import assert_equal
from .networks import SYNCHRONOUS, batch, kinds, made, network, parameters, pipeline, plans, residuals


@settings(max_examples=6)
@given(plans(), kinds, st.integers(1, 2), st.integers(0, 1000))
def test_value_and_gradients_are_those_of_the_function(
    schedule: Schedule, contents: list[str], size: int, seed: int
) -> None:
    contents = (contents * schedule.depth)[: max(schedule.depth, len(contents))]
    loss, params = network(contents), parameters(contents, seed)
    data = batch(max(2, size * schedule.microbatches), seed)
    step = fp.compile(fp.grad_and_value(pipeline(schedule)(loss)), Mesh(pipe=schedule.ranks))
    assert_equal(step(params, *data), fp.grad_and_value(loss)(params, *data))


@settings(max_examples=6)
@given(plans(most_ranks=4), kinds, st.integers(1, 2), st.integers(0, 1000))
def test_the_bits_are_those_of_the_same_microbatches_on_one_rank(
    schedule: Schedule, contents: list[str], size: int, seed: int
) -> None:
    """Not integers here, so that any other order of sums would show: of microbatches, or of a weight's several uses."""
    contents = (contents * schedule.depth)[: max(schedule.depth, len(contents))]
    generator = torch.Generator().manual_seed(seed)
    params = optree.tree_map(lambda x: torch.randn(x.shape, generator=generator), parameters(contents, seed))
    data = batch(size * schedule.microbatches, seed)
    found = []
    for plan, mesh in zip((pipeline(schedule), chains(schedule)), meshes(schedule), strict=True):
        found.append(fp.compile(fp.grad_and_value(plan(network(contents))), mesh)(params, *data))
    assert_equal(*found)


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.every(2)
def test_training_gives_the_bits_of_the_same_microbatches_on_one_rank(name: str) -> None:
    """Not integers here: tanh, AdamW and a clipped norm, so that any other order of sums would show."""
    assert_equal(*trained_both_ways(name, torch.randn(8, 2, dtype=torch.float64), whole=False))


def trained_both_ways(name: str, data: torch.Tensor, whole: bool = True) -> tuple[Any, ...]:
    """What a schedule trains, the same microbatches on one rank, and without any (`whole`): parameters and metrics."""
    schedule = made(name, 2, 4)
    params = {"layers": optree.tree_map(torch.randn_like, parameters(["linear"] * 6, 0))["layers"]}
    piped, one = zip((pipeline(schedule), chains(schedule)), meshes(schedule), strict=True)
    ways = (piped, one, (None, Mesh())) if whole else (piped, one)
    return tuple(trained(residuals, plan, mesh, params, data) for plan, mesh in ways)


def meshes(schedule: Schedule) -> tuple[Mesh, Mesh]:
    return Mesh(pipe=schedule.ranks), Mesh(pipe=1)


def chains(schedule: Schedule) -> Any:
    """The same microbatches one after another; a schedule with two chains adds up each half by itself."""
    if schedule.chains == 1:
        return fp.accumulate(schedule.microbatches)
    half = schedule.microbatches_of_chain
    row = " ".join(f"{c}F{m} {c}B{m}" for c in range(schedule.chains) for m in range(half))
    alone = Schedule.of([row], schedule.microbatches, chains=schedule.chains, name="two halves")
    return fp.pipeline("pipe", schedule=alone, microbatches=schedule.microbatches)


def trained(loss: Any, plan: Any, mesh: Mesh, params: Any, data: torch.Tensor) -> Any:
    train = fp.train_step(loss, fp.optim.adamw(1e-2), mesh, plan, clip=0.5)
    state = train.init(params)
    losses = []
    for _ in range(3):
        state, metrics = train(state, data)
        losses += [metrics.loss, metrics.grad_norm]
    return train.whole(state), losses


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-v"])
def test_other_derivatives_do_without_the_schedule(name: str) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x * w)
        return x.sum()

    w, x = torch.tensor([0.3, 0.7], dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    plan, mesh = pipeline(made(name, 2, 4)), Mesh(pipe=2)
    torch.testing.assert_close(fp.compile(fp.hessian(plan(loss)), mesh)(w, x), fp.hessian(loss)(w, x))
    groups = torch.randn(3, 4, 2, dtype=torch.float64)
    of_each = fp.vmap(fp.grad(plan(loss)), in_dims=(None, 0), spmd_axis="data")
    wanted = torch.stack([fp.grad(loss)(w, group) for group in groups])
    torch.testing.assert_close(fp.compile(of_each, Mesh(pipe=2, data=3))(w, groups), wanted)
    value = fp.compile(plan(loss), mesh)(w, x)
    torch.testing.assert_close(value, loss(w, x))
    _, staged = fp.compile(fp.grad_and_value(plan(loss)), mesh)(w, x)
    torch.testing.assert_close(value, staged)


def test_results_per_sample_and_auxiliary_ones() -> None:
    def loss(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        h = x
        for each in w:
            h = torch.tanh(h @ each)
        return h.sum(), {"features": h, "positive": x > 0, "name": "x"}

    w, x = [torch.eye(3, dtype=torch.float64)] * 4, torch.randn(8, 3, dtype=torch.float64)
    plan, mesh = pipeline(made("1f1b", 2, 4)), Mesh(pipe=2)
    got = fp.compile(fp.grad_and_value(plan(loss), has_aux=True), mesh)(w, x)
    wanted = fp.grad_and_value(loss, has_aux=True)(w, x)
    assert got[1][1].pop("name") == wanted[1][1].pop("name")
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.every(2)
def test_a_result_may_be_a_constant(name: str) -> None:
    """The same of every step, though the caller writes into it."""
    twice = torch.arange(3)

    def loss(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        for each in w:
            x = torch.tanh(x @ each)
        return (x**2).mean(), (torch.tensor(3.0), twice, twice)

    w, x = [torch.eye(3, dtype=torch.float64)] * 4, torch.randn(8, 3, dtype=torch.float64)
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(pipe=2), pipeline(made(name, 2, 4)), has_aux=True)
    state = train.init(w)
    for _ in range(2):
        state, metrics = train(state, x)
        assert metrics.aux[0] == 3 and metrics.aux[1].tolist() == metrics.aux[2].tolist() == [0, 1, 2]
        optree.tree_map(torch.Tensor.zero_, metrics.aux)


@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-v"])
def test_extrema_that_no_gradient_needs_are_streamed(name: str, data: int) -> None:
    def loss(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        for each in w:
            x = torch.tanh(x @ each)
        return (x**2).mean(), (x.detach().max(), (-x).detach().amin(), x.detach().abs().amax(0))

    w, x = [torch.randn(3, 3, dtype=torch.float64) for _ in range(4)], torch.randn(16, 3, dtype=torch.float64)
    plan = fp.chain(fp.data_parallel("data"), pipeline(made(name, 2, 4)))
    got = fp.compile(fp.grad_and_value(plan(loss), has_aux=True), Mesh(pipe=2, data=data))(w, x)
    wanted = fp.grad_and_value(loss, has_aux=True)(w, x)
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-v"])
@pytest.mark.parametrize("width", [1, 3])
def test_a_narrow_head_has_the_same_bits(name: str, width: int) -> None:
    """The gradient of a column is a matrix by a vector, whose kernel rounds otherwise when it adds to a sum."""

    def loss(w: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for each in w:
            x = torch.tanh(x @ each)
        return torch.nn.functional.softplus(x).mean()

    generator = torch.Generator().manual_seed(0)
    sizes = [(6, 6), (6, 6), (6, 6), (6, width)]
    w = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    x = torch.randn(64, 6, generator=generator, dtype=torch.float64)
    found = fp.compile(fp.grad_and_value(pipeline(made(name, 2, 4))(loss)), Mesh(pipe=2))(w, x)
    assert_equal(found, fp.compile(fp.grad_and_value(fp.accumulate(4)(loss)), Mesh(pipe=1))(w, x))
