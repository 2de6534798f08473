"""Buckets: fewer collectives, the same bytes, results the same to the bit; gradients are reduced when ready."""

from __future__ import annotations

from functools import cache
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh

from .networks import SPLIT, batch, integer_loss, loss, parameters

MESH = Mesh(data=2, tensor=2)


def compiled(stage: int, microbatches: int = 1, f: Any = integer_loss, **options: Any) -> Any:
    plan = fp.chain(fp.tensor_parallel("tensor", SPLIT), fp.zero(stage, "data"), fp.accumulate(microbatches))
    return fp.compile(fp.grad_and_value(plan(f)), MESH, **options)


@cache
def unbucketed(stage: int, microbatches: int) -> Any:
    return compiled(stage, microbatches, loss, bucket=None)(parameters(2), *batch(8))


@settings(max_examples=5)
@given(stage=st.integers(0, 3), size=st.sampled_from([1, 700, 4096, 1 << 25]), microbatches=st.integers(1, 2))
def test_results_are_the_same_to_the_bit(stage: int, size: int, microbatches: int) -> None:
    plain, bucketed = unbucketed(stage, microbatches), compiled(stage, microbatches, loss, bucket=size)
    for a, b in zip(optree.tree_leaves(plain), optree.tree_leaves(bucketed(parameters(2), *batch(8))), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_same_bytes_in_fewer_collectives(stage: int) -> None:
    params, inputs = parameters(3), batch(8)
    many, few = (compiled(stage, bucket=size).lower(params, *inputs) for size in (None, 1 << 25))
    assert many.bytes_sent() == few.bytes_sent()
    data = {name: few.counts().get((name, ("data",)), 0) for name in ("psum", "psum_scatter", "all_gather")}
    layers = 4  # with the head
    assert (
        data
        == {
            0: {"psum": 2, "psum_scatter": 0, "all_gather": 0},  # all gradients, and the loss
            1: {"psum": 1, "psum_scatter": 0, "all_gather": 0},  # the step scatters them, see below
            2: {"psum": 1, "psum_scatter": 0, "all_gather": 0},
            3: {"psum": 1, "psum_scatter": 1, "all_gather": 2 * layers},  # a layer's two parameters travel together
        }[stage]
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_a_training_step_scatters_and_gathers_once(stage: int) -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.zero(stage, "data"))
    counts = train.lower(train.init(parameters(3)), *batch(8)).counts()
    assert counts[("psum_scatter", ("data",))] == counts[("all_gather", ("data",))] == 1


def test_a_bucket_is_sent_when_it_is_full() -> None:
    params = parameters(8)  # 16 gradients of 1 KiB and one of 256 bytes
    step = fp.compile(fp.grad(fp.data_parallel("data")(loss)), Mesh(data=2), bucket=4096)
    found = [one.operand.nbytes for one in step.lower(params, *batch(8)).collectives() if one.operand.numel > 1]
    assert len(found) == 5
    assert all(size <= 4096 + 1024 for size in found)


@pytest.mark.parametrize("width, buckets", [(16, 1), (128, 1), (256, 3), (512, 3)])
def test_buckets_fit_the_gradients(width: int, buckets: int) -> None:
    """A quarter of them, but no bucket of less than a MiB: so the backward goes on while the first travel."""
    layers = [{"a": torch.empty(width, 2 * width), "b": torch.empty(2 * width, width)} for _ in range(4)]
    step = fp.compile(fp.grad(fp.data_parallel("data")(loss)), Mesh(data=2), bucket="auto")
    arguments = (
        {"layers": layers, "head": torch.empty(width, 4)},
        torch.empty(8, width),
        torch.ones(8, dtype=torch.int64),
    )
    found = [one.operand.nbytes for one in step.lower(*arguments).collectives() if one.operand.numel > 4]
    assert len(found) == buckets
    limit, largest = max(sum(found) // 4, 1 << 20), 4 * 2 * width * width
    assert all(limit <= size < limit + largest for size in found[:-1])


@pytest.mark.parametrize("bucket", [0, -1, "big", 2.5])
def test_a_bucket_of_no_size_is_refused(bucket: Any) -> None:
    with pytest.raises(ValueError, match=r"bucket=.*a number of bytes, 'auto', or None"):
        compiled(0, bucket=bucket).lower(parameters(2), *batch(8))


def test_gradients_are_reduced_as_soon_as_they_are_ready() -> None:
    """The last layer's sum stands before the first layer's backward."""
    step = fp.compile(fp.grad(fp.zero(3, "data")(loss)), Mesh(data=2))
    early = [node.name for node in step.lower(parameters(4), *batch(8)).traced.nodes]
    step = fp.compile(fp.grad(fp.zero(3, "data")(loss)), Mesh(data=2), without=("reductions",))
    late = [node.name for node in step.lower(parameters(4), *batch(8)).traced.nodes]
    assert sorted(early) == sorted(late)

    def last_product(names: list[str]) -> int:
        return max(index for index, name in enumerate(names) if name.startswith("mm"))

    def sums_before(names: list[str]) -> int:
        return sum(name.startswith("psum") for name in names[: last_product(names)])

    assert sums_before(early) >= 7
    assert sums_before(late) <= 2


def test_passes_can_be_switched_off_and_are_listed() -> None:
    params, inputs = parameters(2), batch(8)
    every = compiled(3, bucket=1 << 20).lower(params, *inputs)
    required = ("axes of one rank", "simplify", "microbatches")
    moving = ("recompute", "gather again", "turned", "gathers", "reductions", "cheap ops again", "buckets")
    optional = (*moving, "folded", "views")
    assert every.passes == (*required, *optional)
    none = compiled(3, bucket=1 << 20, without=optional).lower(params, *inputs)
    assert none.passes == required
    assert none.counts()[("all_gather", ("data",))] == len(optree.tree_leaves(params))
    assert "fp.pack" in str(every).replace("pack(", "fp.pack(") and "pack" not in str(none)
