"""Donated states are written over, once nobody needs them; what somebody does need is left alone."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.ir.graph import operands_of
from functional_parallel.program.aliasing import mutated_operands, readers_before_writes
from functional_parallel.program.overlap import overlapped
from sharding_specs import Mesh, P

from ..laws.random_models import Model
from ..laws.random_plans import Choice
from .networks import SPLIT, batch, loss, parameters

PLANS: dict[str, tuple[Any, Mesh]] = {
    "nothing": (None, Mesh()),
    "data": (fp.data_parallel("data"), Mesh(data=2)),
    "zero 1": (fp.zero(1, "data"), Mesh(data=4)),
    "zero 2, microbatches": (fp.chain(fp.zero(2, "data"), fp.accumulate(2)), Mesh(data=2)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "tensor and zero 1": (fp.chain(fp.tensor_parallel("tensor", SPLIT), fp.zero(1, "data")), Mesh(data=2, tensor=2)),
}


def step(plan: str, f: Any = loss, **options: Any) -> Any:
    transform, mesh = PLANS[plan]
    return fp.train_step(f, fp.optim.adamw(1e-2), mesh, transform, **options)


@cache
def program(plan: str, **options: Any) -> Any:
    train = step(plan, **options)
    return train.lower(train.init(parameters(2)), *batch(8))


def counts(plan: str, **options: Any) -> Counter[str]:
    return Counter(
        str(node.target).split(".")[1] for node in program(plan, **options).traced.nodes if "fp." in str(node.target)
    )


@pytest.mark.parametrize("plan", PLANS)
def test_updates_are_one_call_that_returns_what_it_was_given(plan: str) -> None:
    given, kept = counts(plan), counts(plan, donate=False)
    assert kept["adamw"] == 5 and kept["adamw_"] == 0
    assert given["adamw"] == 0 and given["adamw_"] <= 2, "one per bucket, or per set of axes that it varies over"
    traced = program(plan).traced
    for node in traced.inputs:
        moment = info(node).path.startswith(("0/1/1", "0/1/2"))
        if moment:
            new = traced.outputs[info(node).updated_output]
            assert mutated_operands(new.args[0])[new.args[1]] is node


@pytest.mark.parametrize("plan", ["data", "zero 1", "zero 3"])
def test_updates_of_a_bucket_do_not_wait_for_other_gradients(plan: str) -> None:
    """One call for the gradients in a bucket, and one for those that are sent separately."""
    assert counts(plan, bucket=1024)["adamw_"] == 2


@pytest.mark.parametrize("plan", ["zero 1", "zero 2, microbatches", "tensor and zero 1"])
def test_updated_parameters_are_gathered_into_the_old_ones(plan: str) -> None:
    given, kept = program(plan), program(plan, donate=False)
    whole = sum(info(node).aval.nbytes for node in given.traced.inputs if info(node).is_parameter)
    assert counts(plan)["unpack_"] == counts(plan, donate=False)["unpack"] == 5
    assert given.memory().curve[-1] <= kept.memory().curve[-1] - whole


@pytest.mark.parametrize("plan", PLANS)
def test_what_reads_an_old_value_comes_before_what_overwrites_it(plan: str) -> None:
    traced = program(plan, bucket=256).traced
    readers = readers_before_writes(traced)
    order = {node: index for index, node in enumerate(overlapped(traced, readers))}
    assert set(order) == set(traced.nodes)
    assert readers
    for writer, before in readers.items():
        assert all(order[reader] < order[writer] for reader in before)
        inputs = [each for each in mutated_operands(writer) if each.op == "placeholder"]
        for value in inputs:
            direct = [user for user in value.users if user.op == "call_function" and user is not writer]
            assert all(order[user] < order[writer] for user in direct)
    for node in order:
        assert all(order[each] < order[node] for each in operands_of(node) if each in order)


@pytest.mark.parametrize("plan", sorted(set(PLANS) - {"tensor and zero 1"}))  # which has no whole parameter to report
def test_parameters_that_a_step_reports_are_not_written_over(plan: str) -> None:
    """Or the metrics would show those of the next step."""

    def reporting(params: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return loss(params, x, y), {"row": params["head"][0], "all": params["layers"][0]["a"]}

    train = step(plan, reporting, has_aux=True)
    state, before = train.init(parameters(2)), parameters(2)
    state, metrics = train(state, *batch(8))
    assert torch.equal(metrics.aux["row"], before["head"][0])
    assert torch.equal(metrics.aux["all"], before["layers"][0]["a"])
    reported = optree.tree_map(torch.clone, metrics.aux)
    train(state, *batch(8))
    assert all(map(torch.equal, optree.tree_leaves(reported), optree.tree_leaves(metrics.aux)))


def rows_written(f: Any, shape: tuple[int, ...] = (3, 4)) -> list[str]:
    """Ops that write rows, of a function of a donated state and two other arguments."""
    run = fp.compile(lambda p, s, x, i: f(s, x, i), Mesh(data=1), in_specs=(P(),) * 4, out_specs=P(), state=1)
    x, at = torch.randn(1, 4), torch.tensor([1])
    state, expected = torch.zeros(shape), f(torch.zeros(shape), x, at)
    found, new = run(torch.ones(()), state, x, at)
    again = fp.Sharded.of(state, Mesh(data=1), P())
    found_again, new_again = run(torch.ones(()), again, x, at)
    for wanted, *others in ((expected[0], found, found_again), (expected[1], new.full(), new_again.full())):
        assert all(torch.equal(wanted, other) for other in others)
    names = (str(node.target) for node in run.program.traced.nodes)
    return [name.split(".")[1] for name in names if any(kind in name for kind in ("index_copy", "scatter"))]


def test_ranks_that_share_a_value_do_not_write_into_it() -> None:
    """Simulated ranks hold the zeros of a routing to experts once. Each writes the rows of its own experts."""
    kinds, options = ("experts", "experts"), {"stacked": True, "tied": True, "vocabulary": True, "sequence": True}
    model = Model(kinds=kinds, **options, marks=(), loss="mean", seed=76)
    losses = []
    for axis in ("one", "tensor"):
        choice = Choice(((axis, 1 if axis == "one" else 2),), (0, {}), None, 1, "once", None, "auto")
        train = fp.train_step(
            model, fp.optim.sgd(0.1), choice.mesh, choice.plan(model), has_aux=True, seed=1, bucket=choice.bucket
        )
        losses.append(train(train.init(model.parameters()), model.batch(0, 18))[1].loss)
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)


def test_rows_are_written_into_a_state_that_no_op_reads_later() -> None:
    assert rows_written(lambda s, x, i: (x.sum(), s.index_copy(0, i, x))) == ["index_copy_"]
    assert rows_written(lambda s, x, i: (x.sum(), s.scatter(0, i[:, None].expand(1, 4), x))) == ["scatter_"]
    assert rows_written(lambda s, x, i: (x.sum(), s.scatter(0, i[:, None].expand(1, 4), 2.0))) == ["scatter_"]
    assert rows_written(lambda s, x, i: (x.sum(), torch.slice_scatter(s, x, 0, 1, 2))) == ["slice_scatter_"]
    twice = rows_written(lambda s, x, i: (x.sum(), s.index_copy(0, i, x).index_copy(0, i + 1, x * 2)))
    assert twice == ["index_copy_", "index_copy_"]
    assert rows_written(lambda s, x, i: (s.sum(), s.index_copy(0, i, x))) == ["index_copy_"], "read before"


def test_rows_are_not_written_into_a_value_that_is_read_later() -> None:
    def reads_old(s: Any, x: Any, i: Any) -> Any:
        new = s.index_copy(0, i, x)
        return (new * s).sum(), new

    assert rows_written(reads_old) == ["index_copy"]
    assert rows_written(lambda s, x, i: (s.index_copy(0, i, x), s)) == ["index_copy"], "the old state is returned"
    assert rows_written(lambda s, x, i: (x.sum(), s.index_copy(0, i, s[2:3]))) == ["index_copy"], "rows of itself"
    assert rows_written(lambda s, x, i: (x.sum(), s.view(4, 3).index_copy(0, i, x[:, :3]).view(3, 4))) == ["index_copy"]


@pytest.mark.parametrize("state", [None, torch.zeros(2, 4)])
def test_a_new_state_does_not_share_memory_with_arguments(state: torch.Tensor | None) -> None:
    def take(p: torch.Tensor, s: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(), x

    def write(p: torch.Tensor, s: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sum(), s.index_copy(1, torch.tensor([1]), x[:, :1])

    mesh, plan = Mesh(data=1), fp.data_parallel("data")
    given, w = torch.ones(2, 4), torch.ones(1)
    _, held = fp.compile(plan(take), mesh, state=1)(w, state, given)
    _, held = fp.compile(plan(write), mesh, state=1)(w, held, torch.full((2, 4), 7.0))
    assert torch.equal(given, torch.ones(2, 4))
    assert torch.equal(held.full(), torch.tensor([[1.0, 7.0, 1.0, 1.0]] * 2))
