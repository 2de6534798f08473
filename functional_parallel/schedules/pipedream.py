"""PipeDream schedules: updates run while the pipeline stays full, so weights have versions."""

from __future__ import annotations

from dataclasses import replace

from .actions import Action, Schedule, Versions
from .domain import ranks_of, require
from .one_stage import one_f_one_b


def pipedream(stages: int, microbatches: int, vertical_sync: bool = False) -> Schedule:
    """Build a PipeDream schedule, with an update after every microbatch.

    Stage s of n uses weights that are n − 1 − s updates old.

    >>> from functional_parallel import schedules
    >>> schedule = schedules.pipedream(2, 4)
    >>> [schedule.versions.reads[schedules.Action("F", stage, 3)] for stage in (0, 1)]
    [2, 3]

    The update is w^{t+1} = w^t − λ ∇f(w_0^{t−n+1}, …, w_{n−1}^t), where versions before the first are replaced
    by the first.
    Source: Narayanan et al. 2019, PipeDream, section 3.3.

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches in the stream.
        vertical_sync: whether a microbatch uses one version, n − 1 updates old, on all stages.

    Returns:
        The schedule with its versions.
    """
    ranks = ranks_of("pipedream", stages, microbatches)
    delays = [ranks - 1 - (0 if vertical_sync else s) for s in range(stages)]
    reads = {Action(k, s, m): max(0, m - delays[s]) for k in "FB" for s in range(stages) for m in range(microbatches)}
    writes = {Action("B", s, m): m + 1 for s in range(stages) for m in range(microbatches)}
    return replace(one_f_one_b(stages, microbatches), versions=Versions(reads, writes), name="pipedream")


def two_bw(stages: int, microbatches: int, batch: int | None = None) -> Schedule:
    """Build a PipeDream-2BW schedule, with an update after every batch. Gradients are one update old.

    Each stage keeps two versions of its weights.

    >>> from functional_parallel import schedules
    >>> schedule = schedules.two_bw(2, 6)
    >>> [schedule.versions.reads[schedules.Action("F", 0, m)] for m in range(6)]
    [0, 0, 0, 0, 1, 1]

    The update is W^{t+1} = W^t − λ ∇f(W^{t−1}), on all stages. Source: Narayanan et al. 2021, Memory-efficient
    pipeline-parallel DNN training, section 3.1 (PipeDream-2BW).

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches in the stream; a multiple of `batch`.
        batch: number of microbatches per update, at least the number of stages. Defaults to the number of stages.

    Returns:
        The schedule with its versions.
    """
    ranks_of("2bw", stages, microbatches)
    size = stages if batch is None else batch
    rule = "at least one microbatch per stage in a batch"
    require("2bw", rule, "batch", size, lambda number: number >= stages, f"stages={stages}")
    full = "full batches of microbatches"
    require("2bw", full, "microbatches", microbatches, lambda number: number % size == 0, f"batch={size}")
    pairs = [(s, m) for s in range(stages) for m in range(microbatches)]
    reads = {Action(kind, s, m): max(0, m // size - 1) for kind in "FB" for s, m in pairs}
    writes = {Action("B", s, m): (m + 1) // size for s, m in pairs if (m + 1) % size == 0}
    return replace(one_f_one_b(stages, microbatches), versions=Versions(reads, writes), name="2bw")
