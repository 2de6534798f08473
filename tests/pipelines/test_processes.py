"""Pipelines on real processes: the same bits as on simulated ranks, by every schedule."""

from __future__ import annotations

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.schedules import Schedule

from ..processes import run_on_processes
from .networks import SYNCHRONOUS
from .work import FOUR, all_schedules, four_ranks, gradients, schedule_case, trained


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


KINDS = ["1f1b", "dualpipe", "interleaved", "v-half", "zb-h2", "zb-v"]  # chunks, folds, chains, parts of a backward


def by_schedules(rank: int, names: list[str]) -> dict[str, list[torch.Tensor]]:
    return gradients(names, 2)


@pytest.mark.parametrize("names", [KINDS, pytest.param(sorted({*SYNCHRONOUS} - {*KINDS}), marks=pytest.mark.slow)])
def test_every_schedule_on_two_processes(names: list[str]) -> None:
    """In floats: the gradients without a pipeline, and the bits of simulated ranks, which add microbatches in order."""
    simulated = gradients(names, 2)
    for found in run_on_processes(by_schedules, 2, names):
        for name in names:
            assert_plain(name, 2, found[name])
            schedule, _, _ = schedule_case(name, 2)
            assert same(found[name], simulated[name]) or not adds_in_order(schedule), name


@pytest.mark.slow
def test_every_schedule_on_four_processes() -> None:
    """The backend adds four summands in an order of its own, so floats agree within rounding."""
    for found in run_on_processes(all_schedules, 4, 4, timeout=600):
        for name in SYNCHRONOUS:
            assert_plain(name, 4, found[name])


def adds_in_order(schedule: Schedule) -> bool:
    """Whether every stage's weight gradients are computed in ascending order of microbatches."""
    added = [(action.stage, action.microbatch) for rank in schedule.actions for action in rank if action.kind in "BW"]
    return all(
        (numbers := [number for stage, number in added if stage == each]) == sorted(numbers)
        for each in range(schedule.stages)
    )


def assert_plain(name: str, ranks: int, found: list[torch.Tensor]) -> None:
    _, loss, args = schedule_case(name, ranks)
    wanted = optree.tree_leaves(fp.grad_and_value(loss)(*args))
    assert any((x != x.round()).any() for x in wanted), "integers would hide the order of sums"
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


ALWAYS = ["pipe and data, zero 3"]  # and all axes at once: `test_training.test_steps_on_eight_processes`


@pytest.mark.parametrize("names", [ALWAYS, pytest.param(sorted({*FOUR} - {*ALWAYS}), marks=pytest.mark.slow)])
def test_other_axes_beside_a_pipeline_on_four_processes(names: list[str]) -> None:
    wanted = {name: trained(*FOUR[name]) for name in names}
    for found in run_on_processes(four_ranks, 4, names, timeout=300):
        assert {name: same(found[name], wanted[name]) for name in wanted} == dict.fromkeys(wanted, True)
