"""PipeDream: the pipeline never drains; each backward is followed by an update, so weights have versions.

A microbatch's backward must use the weights of its forward, so a stage keeps the versions that microbatches under way
have used (weight stashing). Which version each action reads, and after which backward a new one is made, is part of the
schedule. The order of actions is that of 1F1B: a rank's warm-up and drain happen once, at the stream's ends.
"""

from __future__ import annotations

from .actions import Action, Schedule, Versions
from .domain import ranks_of, require
from .one_f_one_b import one_f_one_b

__all__ = ["pipedream", "two_bw"]


def pipedream(stages: int, microbatches: int, vertical_sync: bool = False) -> Schedule:
    """Update after every microbatch; stage s of n uses weights n − 1 − s updates old.

    >>> from functional_parallel import schedules
    >>> schedule = schedules.pipedream(2, 4)
    >>> [schedule.versions.reads[schedules.Action("F", stage, 3)] for stage in (0, 1)]
    [2, 3]

    The update is w^{t+1} = w^t − λ ∇f(w_0^{t−n+1}, …, w_{n−1}^t), with versions before the first taken as the first.
    Source: Narayanan et al. 2019, PipeDream, section 3.3.

    Args:
        stages: how many stages, one per rank.
        microbatches: how many microbatches the stream has.
        vertical_sync: whether a microbatch uses the same version, n − 1 updates old, on every stage.

    Returns:
        The schedule with its versions.
    """
    ranks = ranks_of("pipedream", stages, microbatches)
    delays = [ranks - 1 - (0 if vertical_sync else s) for s in range(stages)]
    reads = {Action(k, s, m): max(0, m - delays[s]) for k in "FB" for s in range(stages) for m in range(microbatches)}
    writes = {Action("B", s, m): m + 1 for s in range(stages) for m in range(microbatches)}
    return _stream("pipedream", stages, microbatches, Versions(reads, writes))


def two_bw(stages: int, microbatches: int, batch: int | None = None) -> Schedule:
    """Update after every batch of microbatches, by gradients one update old: two versions are kept.

    >>> from functional_parallel import schedules
    >>> schedule = schedules.two_bw(2, 6)
    >>> [schedule.versions.reads[schedules.Action("F", 0, m)] for m in range(6)]
    [0, 0, 0, 0, 1, 1]

    The update is W^{t+1} = W^t − λ ∇f(W^{t−1}), for all stages alike. Source: Narayanan et al. 2021, Memory-efficient
    pipeline-parallel DNN training, section 3.1 (PipeDream-2BW).

    Args:
        stages: how many stages, one per rank.
        microbatches: how many microbatches the stream has: whole batches.
        batch: how many microbatches an update sums, as many as stages or more; as many as stages without it.

    Returns:
        The schedule with its versions.
    """
    ranks_of("2bw", stages, microbatches)
    size = stages if batch is None else batch
    rule = "batches of at least as many microbatches as stages"
    require("2bw", rule, "batch", size, lambda number: number >= stages, f"stages={stages}")
    whole = "whole batches of microbatches"
    require("2bw", whole, "microbatches", microbatches, lambda number: number % size == 0, f"batch={size}")
    pairs = [(s, m) for s in range(stages) for m in range(microbatches)]
    reads = {Action(kind, s, m): max(0, m // size - 1) for kind in "FB" for s, m in pairs}
    writes = {Action("B", s, m): (m + 1) // size for s, m in pairs if (m + 1) % size == 0}
    return _stream("2bw", stages, microbatches, Versions(reads, writes))


def _stream(name: str, stages: int, microbatches: int, versions: Versions) -> Schedule:
    order = one_f_one_b(stages, microbatches)
    return Schedule(order.actions, order.rank_of_stage, microbatches, versions=versions, name=name)
