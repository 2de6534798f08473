"""Layer-wise model parallelism: one microbatch after another, one rank at work at a time."""

from __future__ import annotations

from .actions import Action, Schedule
from .domain import ranks_of

__all__ = ["naive"]


def naive(stages: int, microbatches: int) -> Schedule:
    """Each microbatch goes forward and back before the next one starts.

    >>> from functional_parallel import schedules
    >>> print(schedules.naive(2, 2))
    naive: 2 stages on 2 ranks, 2 microbatches
    rank 0  0F0  0B0  0F1  0B1
    rank 1  1F0  1B0  1F1  1B1

    Args:
        stages: how many stages, one per rank.
        microbatches: how many microbatches a step has.

    Returns:
        The schedule; a rank holds one microbatch's activations and idles for (stages − 1)/stages of the time.
    """
    ranks = ranks_of("naive", stages, microbatches)
    rows = ([Action(kind, r, m) for m in range(microbatches) for kind in "FB"] for r in range(ranks))
    return Schedule(tuple(map(tuple, rows)), tuple(range(ranks)), microbatches, name="naive")
