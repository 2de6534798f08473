"""Mixed precision and loss scales on gloo processes: the bits of simulated ranks."""

from __future__ import annotations

import optree
import torch

import functional_parallel as fp

from ...processes import run_on_processes
from . import work


def test_processes_agree_with_simulated_ranks() -> None:
    results = run_on_processes(work.on_a_rank, 2, timeout=120)
    rules = fp.LossScale(initial=16.0, hysteresis=1)
    expected = [work.trained(stage, work.BATCHES, rules, clip=0.5) for stage in (0, 1, 3)]
    assert expected[0][1].loss_scale.scale.item() == 4.0
    for found in results:
        assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(expected)))
