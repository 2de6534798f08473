"""Layer-wise model parallelism: microbatches run sequentially, and one rank works at a time."""

from __future__ import annotations

from .actions import Action, Schedule
from .domain import ranks_of

__all__ = ["naive"]


def naive(stages: int, microbatches: int) -> Schedule:
    """Build a sequential schedule: each microbatch runs forward and backward before the next one starts.

    >>> from functional_parallel import schedules
    >>> print(schedules.naive(2, 2))
    naive: 2 stages on 2 ranks, 2 microbatches
    rank 0  0F0  0B0  0F1  0B1
    rank 1  1F0  1B0  1F1  1B1

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches per step.

    Returns:
        The schedule. A rank holds the activations of one microbatch and is idle for (stages − 1)/stages of the time.
    """
    ranks = ranks_of("naive", stages, microbatches)
    rows = ([Action(kind, r, m) for m in range(microbatches) for kind in "FB"] for r in range(ranks))
    return Schedule(tuple(map(tuple, rows)), tuple(range(ranks)), microbatches, name="naive")
