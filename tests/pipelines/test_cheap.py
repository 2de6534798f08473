"""Stages compute cheap values again for their backward: the same bits, no rank holds more, nothing is sent twice."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import optree
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import fx

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.passes import cheap
from sharding_specs import Mesh

from ..passes.test_cheap import KINDS, OFF, loss, no_value_is_small, parameters, tokens
from .networks import made, pipeline
from .test_memory import OneRank

__all__ = ["no_value_is_small"]

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")


@settings(
    max_examples=5,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=4, max_size=4),
    name=st.sampled_from(SCHEDULES),
    stage=st.integers(0, 3),
    keep=st.booleans(),
    remat=st.booleans(),
)
def test_the_same_bits_on_ranks_that_hold_no_more(
    no_value_is_small: None, kinds: list[str], name: str, stage: int, keep: bool, remat: bool
) -> None:
    schedule = made(name, 2, 4, 2)
    before = [fp.remat("attention" if name == "gpipe" else "layers")] if remat else []
    plan = fp.chain(*before, fp.zero(stage, "data", keep_gathered=keep), pipeline(schedule))
    f, params, batch = plan(partial(loss, kinds=kinds)), parameters(kinds), tokens(16)
    on, off = (fp.compile(fp.grad_and_value(f), Mesh(pipe=2, data=2), without=without) for without in ((), OFF))
    results = [step(params, batch) for step in (on, off)]
    assert all(optree.tree_leaves(optree.tree_map(torch.equal, *results)))
    pairs = zip(on.program.memory().ranks, off.program.memory().ranks, strict=True)
    assert all(rank.peak <= other.peak for rank, other in pairs)
    assert on.program.bytes_sent() == off.program.bytes_sent()


def step(kinds: list[str], name: str, *without: str, rows: int = 16) -> Any:
    train = fp.train_step(
        partial(loss, kinds=kinds), fp.optim.adamw(1e-2), Mesh(pipe=2), pipeline(made(name, 2, 4, 2)), without=without
    )
    return train.lower(train.init(parameters(kinds)), tokens(rows))


def held(values: Collection[fx.Node]) -> int:
    leaves = (leaf for node in values for leaf in optree.tree_leaves(info(node).val))
    return sum(leaf.nbytes for leaf in leaves)


def kept(values: Collection[fx.Node]) -> int:
    """The bytes of a forward's values."""
    return held([node for node in values if not info(node).backward])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.every(2)
def test_residuals_are_fewer_and_as_predicted(name: str, no_value_is_small: None) -> None:
    kinds = ["norm", "gate", "norm", "gelu"]
    on, off = step(kinds, name), step(kinds, name, *OFF)
    assert cheap.RecomputeCheap.name in on.passes and cheap.RecomputeCheap.name not in off.passes
    for stage, other in zip(on.stages, off.stages, strict=True):
        assert kept(stage.after_forward) < kept(other.after_forward)
        assert held(stage.after_input) <= held(other.after_input)
    for rank, memory in enumerate(on.memory().ranks):
        assert OneRank(on, rank).peak() == memory.peak <= off.memory().ranks[rank].peak


def test_stages_keep_what_only_other_stages_have(no_value_is_small: None) -> None:
    """The value that all stages take, of which only the first has the operand."""
    on, off = step(["late"] * 4, "1f1b"), step(["late"] * 4, "1f1b", *OFF)
    for stage, other in zip(on.stages[1:], off.stages[1:], strict=True):
        assert {n.name for n in stage.after_forward} <= {n.name for n in other.after_forward}
