"""Pipelines on real processes: the same bits as on simulated ranks, by every schedule."""

from __future__ import annotations

import pytest
import torch

from ..processes import run_on_processes
from .networks import SYNCHRONOUS
from .work import FOUR, all_schedules, four_ranks, gradients, trained


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_every_schedule_on_two_processes() -> None:
    wanted = gradients(SYNCHRONOUS, 2)
    for found in run_on_processes(all_schedules, 2, 2):
        assert {name: same(found[name], wanted[name]) for name in wanted} == dict.fromkeys(wanted, True)


@pytest.mark.slow
def test_every_schedule_on_four_processes() -> None:
    wanted = gradients(SYNCHRONOUS, 4)
    for found in run_on_processes(all_schedules, 4, 4, timeout=600):
        assert {name: same(found[name], wanted[name]) for name in wanted} == dict.fromkeys(wanted, True)


def test_other_axes_beside_a_pipeline_on_four_processes() -> None:
    wanted = {name: trained(*case) for name, case in FOUR.items()}
    for found in run_on_processes(four_ranks, 4, timeout=300):
        assert {name: same(found[name], wanted[name]) for name in wanted} == dict.fromkeys(wanted, True)
