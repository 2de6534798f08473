"""1F1B schedules: after a warm-up of forwards, a rank alternates one forward and one backward."""

from __future__ import annotations

from .actions import Action, Schedule
from .domain import ranks_of

__all__ = ["alternate", "eager_one_f_one_b", "one_f_one_b"]


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
    return Schedule(tuple(rows), tuple(range(ranks)), microbatches, name=name)


def alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> tuple[Action, ...]:
    """Run `ahead` forwards, then alternate one forward and one backward, then run the remaining backwards."""
    steady = zip(forwards[ahead:], backwards, strict=False)
    rest = backwards[len(forwards) - ahead :]
    return (*forwards[:ahead], *(action for pair in steady for action in pair), *rest)
