"""Microbatches: the whole batch's loss and gradient, exactly, with one reduction per step."""

from __future__ import annotations

from functools import cache
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh, SpecError

from .networks import SPLIT, batch, integer_loss, loss, noisy_loss, parameters


@settings(max_examples=9)
@given(
    stage=st.integers(0, 3),
    data=st.sampled_from([1, 2, 4]),
    tensor=st.sampled_from([1, 2]),
    microbatches=st.integers(1, 4),
    per_microbatch=st.integers(1, 3),
)
def test_integer_sums_are_exact(stage: int, data: int, tensor: int, microbatches: int, per_microbatch: int) -> None:
    params = parameters(2, integers=True)
    plan = fp.chain(fp.tensor_parallel("tensor", SPLIT), fp.zero(stage, "data"), fp.accumulate(microbatches))
    inputs = batch(data * microbatches * per_microbatch, integers=True)
    fp.testing.assert_equivalent(integer_loss, plan, Mesh(data=data, tensor=tensor), params, *inputs, exact=True)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("microbatches", [2, 4])
def test_a_mean_over_targets_that_count_is_the_whole_batchs(microbatches: int, keep: bool) -> None:
    """A mean of the microbatches' means weighs targets by how many are ignored beside them."""
    plan = fp.chain(fp.zero(3, "data", keep_gathered=keep), fp.accumulate(microbatches))
    fp.testing.assert_equivalent(loss, plan, Mesh(data=2), parameters(2), *batch(32))


def test_the_loss_of_a_mean_of_means_differs() -> None:
    """So the test before this one can fail."""
    params, (x, y) = parameters(2), batch(32)
    parts = [loss(params, a, b) for a, b in zip(x.chunk(4), y.chunk(4), strict=True)]
    assert (sum(parts) / 4 - loss(params, x, y)).abs() > 1e-6


def test_gradients_are_summed_over_ranks_once() -> None:
    plan = fp.chain(fp.data_parallel("data"), fp.accumulate(3))
    step = fp.compile(fp.grad(plan(integer_loss)), Mesh(data=2))
    params = parameters(2)
    step(params, *batch(16))
    assert step.program.counts() == {("psum", ("data",)): len(optree.tree_leaves(params))}


@pytest.mark.parametrize(("keep", "gathers"), [(True, 1), (False, 2 * 3)])
def test_zero_3_gathers_per_microbatch_unless_kept(keep: bool, gathers: int) -> None:
    plan = fp.chain(fp.zero(3, "data", keep_gathered=keep), fp.accumulate(3))
    params = parameters(2)
    counts = fp.compile(fp.grad(plan(loss)), Mesh(data=2)).lower(params, *batch(12)).counts()
    leaves = len(optree.tree_leaves(params))
    first_layer_needs_no_input_gradient = 0 if keep else 3
    assert counts[("all_gather", ("data",))] == gathers * leaves - first_layer_needs_no_input_gradient
    assert counts[("psum_scatter", ("data",))] == leaves


def noisily_trained(samples: int, mesh: Mesh, plan: Any) -> list[torch.Tensor]:
    train = fp.train_step(noisy_loss, fp.optim.adamw(1e-2), mesh, plan, clip=1.0, seed=3)
    state = train.init(parameters(2))
    for _ in range(4):
        state, metrics = train(state, *batch(samples))
    return optree.tree_leaves((train.params(state), metrics.loss))


@cache
def at_once(samples: int) -> list[torch.Tensor]:
    return noisily_trained(samples, Mesh(), None)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("samples", "microbatches"), [(16, 2), (14, 3)])
@pytest.mark.every(2)
def test_training_with_dropout_equals_training_at_once(samples: int, microbatches: int, stage: int) -> None:
    """Draws are keyed by position in the whole batch, so microbatches change none, unequal ones neither."""
    plan = fp.chain(fp.remat(), fp.zero(stage, "data"), fp.accumulate(microbatches))
    for a, b in zip(noisily_trained(samples, Mesh(data=2), plan), at_once(samples), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def test_the_bits_are_those_of_adding_microbatches_in_order() -> None:
    """A sum over microbatches has a fixed order, the first one first."""
    params, (x, y) = parameters(2), batch(12)
    plan = fp.accumulate(3)
    gradients = fp.compile(fp.grad(plan(lambda p, x, y: integer_loss(p, x, y) * 0.37)), Mesh())(params, x, y)
    parts = [torch.func.grad(lambda p, x=x, y=y: integer_loss(p, x, y) * 0.37)(params) for x, y in _cut(x, y, 3)]
    summed = optree.tree_map(lambda a, b, c: a + b + c, *parts)
    assert all(
        torch.equal(a, b) for a, b in zip(optree.tree_leaves(gradients), optree.tree_leaves(summed), strict=True)
    )


def _cut(x: torch.Tensor, y: torch.Tensor, parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))


def test_outputs_per_sample_come_back_whole() -> None:
    plan = fp.chain(fp.data_parallel("data"), fp.accumulate(2))
    step = fp.compile(plan(lambda w, x: x @ w), Mesh(data=2))
    w, x = torch.arange(6.0).reshape(2, 3), torch.arange(16.0).reshape(8, 2)
    assert torch.equal(step(w, x), x @ w)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_microbatch_knows_its_number(ranks: int) -> None:
    """A lookup among samples asks which microbatch it is, the first of one as of several."""
    plan = fp.chain(fp.data_parallel("data"), fp.accumulate(1))
    w, a, b = (torch.arange(9.0 * rows).reshape(3 * rows, 3) % 5 for rows in (1, 2, 2))

    def pairs(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a @ w) @ b.T).index_select(1, torch.tensor([1, 4, 2])).sum()

    fp.testing.assert_equivalent(pairs, plan, Mesh(data=ranks), w, a, b, exact=True)


@pytest.mark.parametrize("microbatches", [0, -1, True, 2.0])
def test_a_number_of_microbatches_is_positive(microbatches: object) -> None:
    with pytest.raises(ValueError, match=r"accumulate\(.*\): give the number of microbatches"):
        fp.accumulate(microbatches)  # type: ignore[arg-type]


def test_no_more_microbatches_than_samples() -> None:
    plan = fp.chain(fp.data_parallel("data"), fp.accumulate(9))
    step = fp.compile(fp.grad(plan(loss)), Mesh(data=2))
    with pytest.raises(
        SpecError, match=r"a batch of 8 on each rank cannot be cut into 9 microbatches: take 8 or fewer"
    ):
        step(parameters(1), *batch(16))


def test_an_axis_may_not_share_the_name() -> None:
    with pytest.raises(ValueError, match="'microbatch', the name of the axis of microbatches; rename it"):
        fp.compile(fp.grad(fp.accumulate(2)(loss)), Mesh(microbatch=2))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reducing_after_each_microbatch(stage: int) -> None:
    """The same sums, n times the reductions; the loss's psum counts once per microbatch either way."""
    params, inputs, found = parameters(2), batch(12), {}
    for reduce in ("once", "each"):
        plan = fp.chain(fp.zero(stage, "data"), fp.accumulate(3, reduce=reduce))
        train = fp.train_step(integer_loss, fp.optim.sgd(0.25), Mesh(data=2), plan, bucket=None)
        state, metrics = train(train.init(parameters(2, integers=True)), *batch(12, integers=True))
        counts = train.program.counts()
        found[reduce] = (counts, optree.tree_leaves((train.params(state), metrics.loss)))
    assert all(torch.equal(a, b) for a, b in zip(found["once"][1], found["each"][1], strict=True))
    leaves = len(optree.tree_leaves(params))
    kind = "psum" if stage == 0 else "psum_scatter"
    sums = {reduce: found[reduce][0][(kind, ("data",))] for reduce in found}
    assert sums["each"] - sums["once"] == 2 * leaves
    assert inputs[0].shape[0] == 12


def test_reduce_is_once_or_each() -> None:
    with pytest.raises(ValueError, match=r"accumulate\(reduce='often'\): it is 'once' or 'each'"):
        fp.accumulate(2, reduce="often")


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_sums_over_microbatches_of_what_ranks_summed_are_typed_so(stage: int) -> None:
    """What ranks have summed is the same on all of them, and so are sums of it; of a shard, sums differ as it does."""
    tensor = fp.tensor_parallel("tensor", SPLIT)
    plan = fp.chain(tensor, fp.data_parallel("replica"), fp.zero(stage, "data"), fp.accumulate(3, reduce="each"))
    step = fp.compile(fp.grad(plan(integer_loss)), Mesh(replica=2, data=2, tensor=2))
    nodes = step.lower(parameters(2), *batch(48)).traced.nodes
    sums = [node for node in nodes if node.target is torch.ops.aten.add.Tensor and info(node).backward]
    assert len(sums) >= 2 * len(optree.tree_leaves(parameters(2)))
    for node in sums:
        assert info(node).type == info(node.args[0]).type == info(node.args[1]).type
