"""Schedules with one stage per rank and unsplit backwards: sequential, GPipe and 1F1B."""

from __future__ import annotations

from collections.abc import Iterable

from .actions import Action, Schedule
from .domain import ranks_of


def one_stage_per_rank(name: str, rows: Iterable[Iterable[Action]], microbatches: int) -> Schedule:
    actions = tuple(map(tuple, rows))
    return Schedule(actions, tuple(range(len(actions))), microbatches, name=name)


def naive(stages: int, microbatches: int) -> Schedule:
    """Build a sequential schedule: each microbatch runs forward and backward before the next starts.

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
    return one_stage_per_rank("naive", rows, microbatches)


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
    return one_stage_per_rank("gpipe", rows, microbatches)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Build a 1F1B schedule. Rank r of P runs P − 1 − r forwards ahead, then alternates one forward and one backward.

    >>> from functional_parallel import schedules
    >>> print(schedules.one_f_one_b(2, 3))
    1f1b: 2 stages on 2 ranks, 3 microbatches
    rank 0  0F0  0F1  0B0  0F2  0B1  0B2
    rank 1  1F0  1B0  1F1  1B1  1F2  1B2

    Source: Narayanan et al. 2021, Memory-efficient pipeline-parallel DNN training, section 3.2 (PipeDream-Flush); Fan
    et al. 2021, DAPPLE.

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches per step.

    Returns:
        The schedule; rank r of P holds the activations of P − r microbatches at most.
    """
    return _warmed("1f1b", stages, microbatches, ahead=1)


def eager_one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Build a 1F1B schedule with twice the number of forwards ahead.

    Transfers have more time to arrive, at the cost of twice the activations.

    >>> from functional_parallel import schedules
    >>> print(schedules.eager_one_f_one_b(2, 3))
    eager-1f1b: 2 stages on 2 ranks, 3 microbatches
    rank 0  0F0  0F1  0F2  0B0  0B1  0B2
    rank 1  1F0  1B0  1F1  1B1  1F2  1B2

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches per step.

    Returns:
        The schedule; rank r of P holds the activations of 2(P − r) − 1 microbatches at most.
    """
    return _warmed("eager-1f1b", stages, microbatches, ahead=2)


def _warmed(name: str, stages: int, microbatches: int, ahead: int) -> Schedule:
    ranks = ranks_of(name, stages, microbatches)
    forwards, backwards = ([[Action(k, r, m) for m in range(microbatches)] for r in range(ranks)] for k in "FB")
    rows = (alternate(forwards[r], backwards[r], min(ahead * (ranks - 1 - r), microbatches)) for r in range(ranks))
    return one_stage_per_rank(name, rows, microbatches)


def alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    steady = zip(forwards[ahead:], backwards, strict=False)
    rest = backwards[len(forwards) - ahead :]
    return (*forwards[:ahead], *(action for pair in steady for action in pair), *rest)
