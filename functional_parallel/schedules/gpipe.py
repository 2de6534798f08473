"""GPipe schedule: all forwards, then all backwards."""

from __future__ import annotations

from .actions import Action, Schedule
from .domain import ranks_of

__all__ = ["gpipe"]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Build a GPipe schedule: the forwards of all microbatches, then all backwards.

    >>> from functional_parallel import schedules
    >>> print(schedules.gpipe(2, 2))
    gpipe: 2 stages on 2 ranks, 2 microbatches
    rank 0  0F0  0F1  0B0  0B1
    rank 1  1F0  1F1  1B0  1B1

    Source: Huang et al. 2019, GPipe, section 2.2. The order of the backwards does not change time or memory. Here it
    is the order of the forwards, so every rank sums gradients in the order of microbatches.

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches per step.

    Returns:
        The schedule; a rank holds the activations of all microbatches.
    """
    ranks = ranks_of("gpipe", stages, microbatches)
    rows = ([Action(kind, r, m) for kind in "FB" for m in range(microbatches)] for r in range(ranks))
    return Schedule(tuple(map(tuple, rows)), tuple(range(ranks)), microbatches, name="gpipe")
