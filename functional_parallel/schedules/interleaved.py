"""Schedules with several stages per rank: stage s is on rank s mod P. V stages per rank divide the bubble by V."""

from __future__ import annotations

from .actions import Action, Schedule
from .domain import ranks_of, require
from .one_stage import alternate


def interleaved(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Build an interleaved 1F1B schedule. Each group of microbatches runs the `chunks` stages of a rank in turn.

    >>> from functional_parallel import schedules
    >>> print(schedules.interleaved(4, 2, chunks=2))
    interleaved: 4 stages on 2 ranks, 2 microbatches
    rank 0  0F0  0F1  2F0  2F1  2B0  2B1  0B0  0B1
    rank 1  1F0  1F1  3F0  3B0  3F1  3B1  1B0  1B1

    Source: Narayanan et al. 2021, Efficient large-scale language model training on GPU clusters using Megatron-LM,
    section 2.2. On P ranks, M microbatches form max(1, ⌊M/P⌋) groups. A group has P microbatches if P divides M.

    Args:
        stages: number of stages, `chunks` per rank.
        microbatches: number of microbatches per step. All groups must have the same size.
        chunks: number of stages per rank.

    Returns:
        The schedule.
    """
    ranks = ranks_of("interleaved", stages, microbatches, chunks)
    rule = "microbatches that divide evenly into microbatches // ranks groups"
    others = f"{ranks} ranks"
    require("interleaved", rule, "microbatches", microbatches, lambda m: m % max(1, m // ranks) == 0, others)
    group = microbatches // max(1, microbatches // ranks)
    order = [
        (chunk, m)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for m in range(start, start + group)
    ]
    rows = []
    for r in range(ranks):
        forwards = [Action("F", chunk * ranks + r, m) for chunk, m in order]
        backwards = [Action("B", (chunks - 1 - chunk) * ranks + r, m) for chunk, m in order]
        ahead = 2 * (ranks - 1 - r) + (chunks - 1) * group if chunks > 1 else ranks - 1 - r
        rows.append(alternate(forwards, backwards, min(ahead, len(order))))
    return Schedule(tuple(rows), tuple(s % ranks for s in range(stages)), microbatches, name="interleaved")


def breadth_first(stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Build a breadth-first schedule. All microbatches run a stage of a rank before its next stage; then the reverse.

    >>> from functional_parallel import schedules
    >>> print(schedules.breadth_first(4, 2, chunks=2))
    looped-bfs: 4 stages on 2 ranks, 2 microbatches
    rank 0  0F0  0F1  2F0  2F1  2B1  2B0  0B1  0B0
    rank 1  1F0  1F1  3F0  3F1  3B1  3B0  1B1  1B0

    Source: Lamy-Poirier 2023, Breadth-first pipeline parallelism.

    Args:
        stages: number of stages, `chunks` per rank.
        microbatches: number of microbatches per step.
        chunks: number of stages per rank.

    Returns:
        The schedule. A rank holds the activations of all microbatches. It needs the weights of each stage in two
        periods only.
    """
    ranks = ranks_of("looped-bfs", stages, microbatches, chunks)
    rows = []
    for r in range(ranks):
        forwards = [Action("F", s, m) for s in range(r, stages, ranks) for m in range(microbatches)]
        rows.append((*forwards, *(Action("B", s, m) for _, s, m in reversed(forwards))))
    return Schedule(tuple(rows), tuple(s % ranks for s in range(stages)), microbatches, name="looped-bfs")
