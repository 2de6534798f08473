"""ZeRO over several axes of a mesh, each with a stage of its own; and one plan for several models and meshes."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P

from .test_zero import SIZES, data, loss, network

MESHES = [Mesh(replica=2, shard=2), Mesh(shard=2, replica=3), Mesh(replica=2, shard=2, third=2)]
ONE = (Mesh(one=1), None)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Mesh, Any]:
    """A stage for each axis of a mesh, in any order, with or without microbatches."""
    mesh = draw(st.sampled_from(MESHES))
    zeros = []
    for axis in draw(st.permutations(mesh.axis_names)):
        stage = draw(st.integers(0, 3))
        layout = draw(st.sampled_from(["dims", "flat"])) if stage in (1, 2) else "dims"
        zeros.append(
            fp.zero(stage, axis, layout=layout, whole_below=draw(st.sampled_from([0, 6])) * (layout == "dims"))
        )
    return mesh, fp.chain(*zeros, fp.accumulate(draw(st.integers(1, 2))))


def trained(runs: list[tuple[Mesh, Any]], sizes: list[int], clip: float | None) -> list[torch.Tensor]:
    """Parameters, optimizer state and losses of a run that goes on under one plan after another."""
    whole, losses = None, []
    for half, (mesh, plan) in enumerate(runs):
        train = fp.train_step(loss, fp.optim.adamw(1e-2, weight_decay=0.1), mesh, plan, clip=clip)
        state = train.init(network(sizes)) if whole is None else train.load(*whole, step=2 * half)
        for _ in range(2):
            state, metrics = train(state, *data(sizes, 24))
            losses.append(metrics.loss)
        whole = train.whole(state)
    return optree.tree_leaves((whole, losses))


@settings(max_examples=4)
@given(sizes=SIZES, first=plans(), second=plans(), clip=st.sampled_from([None, 0.1]))
def test_a_run_is_that_of_one_rank(sizes: list[int], first: Any, second: Any, clip: float | None) -> None:
    for a, b in zip(trained([first, second], sizes, clip), trained([ONE, ONE], sizes, clip), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_parameters_split_by_some_axes_and_updated_over_another() -> None:
    """One small enough to stay whole over the axis between two that split it."""
    zeros = [fp.zero(3, "replica"), fp.zero(1, "shard", whole_below=6), fp.zero(3, "third")]
    found, wanted = (trained([run], [1, 1, 1], None) for run in ((MESHES[2], fp.chain(*zeros)), ONE))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("layout", ["dims", "flat"])
def test_every_axis_divides_the_optimizers_state(layout: str) -> None:
    """Each of two stages halves what a rank keeps; none is taken for the other."""
    params, optimizer = {"w": torch.empty(64, 32), "v": torch.empty(32, 64)}, fp.optim.sgd(0.1, momentum=0.9)
    size = sum(leaf.nbytes for leaf in params.values())

    def kept(*zeros: Any) -> tuple[int, int]:
        found = fp.estimate(params, Mesh(replica=2, shard=2), fp.chain(*zeros), optimizer=optimizer)
        return round(size / found.parameters), round(size / found.optimizer)

    first, second = fp.zero(1, "shard", layout=layout), fp.zero(2, "replica", layout=layout)
    assert kept(first, second) == (1, 4)
    assert kept(first, fp.zero(3, "replica")) == kept(fp.zero(3, "shard"), second) == (2, 4)
    assert kept(fp.zero(3, "shard"), fp.zero(3, "replica")) == (4, 4)


def two_steps(train: Any, state: Any, sizes: list[int]) -> list[torch.Tensor]:
    for _ in range(2):
        state, _ = train(state, *data(sizes, 24))
    return optree.tree_leaves(train.whole(state))


def test_one_step_for_models_whose_shards_look_alike() -> None:
    """What one model's shards look like another's may look like whole, and two models' shards may look alike."""
    sizes = [[7, 5, 13], [4, 3, 7], [8, 6, 13], [7, 6, 14], [1, 1, 1]]
    alone = [fp.train_step(loss, fp.optim.adamw(1e-2), *ONE, clip=0.5) for _ in sizes]
    wanted = [two_steps(train, train.init(network(each)), each) for train, each in zip(alone, sizes, strict=True)]
    for stage in (1, 2, 3):
        train = fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(data=2), fp.zero(stage, "data"), clip=0.5)
        states = [train.init(network(each)) for each in sizes]
        for each, state, want in zip(sizes, states, wanted, strict=True):
            for a, b in zip(two_steps(train, state, each), want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_one_function_on_several_meshes() -> None:
    """Which dims divide, a mesh says."""
    sizes, f = [6, 4, 3], fp.grad(fp.zero(3, "data")(loss))
    wanted = torch.func.grad(loss)(network(sizes), *data(sizes, 24))
    for ranks in (2, 4, 3, 2):
        found = fp.compile(f, Mesh(data=ranks))(network(sizes), *data(sizes, 24))
        assert all(torch.allclose(found[name], wanted[name], rtol=1e-12) for name in wanted)


SPLIT = {"a": P(None, "tensor"), "b": P("tensor"), "c": P("tensor")}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_axis_inside_another_on_one_dim(stage: int) -> None:
    """One spec says where a parameter lies over all axes, several of them on one dim."""
    mesh, specs = Mesh(data=2, tensor=2), {"a": P(None, ("tensor", "data")), "c": P(("tensor", "data"))}
    plan = fp.chain(fp.tensor_parallel("tensor", SPLIT), fp.zero(stage, "data", {**specs, "b": P(), "s": P()}))
    found, wanted = (trained([run, run], [3, 8, 5], 0.1) for run in ((mesh, plan), ONE))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_dim_that_two_axes_split_is_padded(stage: int) -> None:
    specs = {"a": P(None, ("tensor", "data")), "*": P()}
    plan = fp.chain(fp.tensor_parallel("tensor", SPLIT), fp.zero(stage, "data", specs))
    found, wanted = (trained([run, run], [3, 8, 5], 0.1) for run in ((Mesh(data=3, tensor=2), plan), ONE))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
