"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from .actions import Action, Schedule
from .domain import ranks_of

__all__ = ["gpipe"]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All microbatches go forward, then all go back.

    >>> from functional_parallel import schedules
    >>> print(schedules.gpipe(2, 2))
    gpipe: 2 stages on 2 ranks, 2 microbatches
    rank 0  0F0  0F1  0B0  0B1
    rank 1  1F0  1F1  1B0  1B1

    Source: Huang et al. 2019, GPipe, section 2.2. The order of the backwards changes neither time nor memory; here
    it is that of the forwards, so every rank sums gradients in the order of microbatches.

    Args:
        stages: how many stages, one per rank.
        microbatches: how many microbatches a step has.

    Returns:
        The schedule; a rank holds the activations of all microbatches.
    """
    ranks = ranks_of("gpipe", stages, microbatches)
    rows = ([Action(kind, r, m) for kind in "FB" for m in range(microbatches)] for r in range(ranks))
    return Schedule(tuple(map(tuple, rows)), tuple(range(ranks)), microbatches, name="gpipe")
