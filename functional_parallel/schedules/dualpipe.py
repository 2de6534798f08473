"""DualPipe schedules: microbatches enter at both ends, so a rank can overlap a forward with a backward."""

from __future__ import annotations

from .actions import Schedule
from .domain import ranks_of, require
from .zero_bubble import TwoStages, folded_placement


def dualpipe(stages: int, microbatches: int) -> Schedule:
    """Build a DualPipe schedule: two copies of the model in opposite directions, each with half of the microbatches.

    >>> from functional_parallel import schedules
    >>> print(schedules.dualpipe(2, 4))
    dualpipe: 4 stages in 2 chains on 2 ranks, 4 microbatches
    rank 0  0F0        3F0        0F1        3B0        (3F1;0B0)  3B1        0I1        0W1
    rank 1  2F0        1F0        2F1        1B0        (1F1;2B0)  1B1        2I1        2W1

    Source: DeepSeek-AI 2024, DeepSeek-V3 technical report, section 3.2.1.

    Args:
        stages: number of stages of the model, an even number. Each rank holds one stage of each copy.
        microbatches: number of microbatches per step, over both directions. It is even and at least twice the stages.

    Returns:
        A schedule with two chains: stages 0 to P − 1 in ascending order of ranks, stages P to 2P − 1 in descending
        order. The caller must sum the gradients of the two copies.
    """
    require("dualpipe", "an even number of stages", "stages", stages, lambda number: number % 2 == 0)
    ranks = ranks_of("dualpipe", stages, microbatches)
    rule = "an even number of microbatches, at least twice the stages"
    require("dualpipe", rule, "microbatches", microbatches, lambda n: n % 2 == 0 and n >= 2 * ranks, f"stages={stages}")
    rows = []
    for r in range(ranks):
        down, up = r, 2 * ranks - 1 - r
        rows.append(TwoStages(*((down, up) if r < ranks // 2 else (up, down))))
        _eight_steps(rows[r], min(r, ranks - 1 - r), ranks // 2, microbatches // 2)
    return _schedule("dualpipe", rows, microbatches, chains=2)


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """Build a DualPipeV schedule for one folded model: rank r of P holds stages r and 2P − 1 − r.

    >>> from functional_parallel import schedules
    >>> print(schedules.dualpipe_v(2, 2))
    dualpipe-v: 2 stages on 1 rank, 2 microbatches
    rank 0  0F0        1F0        0F1        1B0        (1F1;0B0)  1B1        0I1        0W1

    Source: DeepSeek-AI 2025, DualPipe, the published code; the fold is from Qi et al. 2024.

    Args:
        stages: number of stages, two per rank.
        microbatches: number of microbatches per step, at least the number of stages.

    Returns:
        The schedule.
    """
    ranks = ranks_of("dualpipe-v", stages, microbatches, 2)
    rule = "at least one microbatch per stage"
    require("dualpipe-v", rule, "microbatches", microbatches, lambda number: number >= stages, f"stages={stages}")
    rows = [TwoStages(r, 2 * ranks - 1 - r) for r in range(ranks)]
    for r, row in enumerate(rows):
        _eight_steps(row, r, ranks, microbatches)
    return _schedule("dualpipe-v", rows, microbatches, chains=1)


def _schedule(name: str, rows: list[TwoStages], microbatches: int, chains: int) -> Schedule:
    actions, pairs = tuple(tuple(row.actions) for row in rows), frozenset(pair for row in rows for pair in row.pairs)
    return Schedule(actions, folded_placement(len(rows)), microbatches, chains, pairs, name=name)


def _eight_steps(row: TwoStages, r: int, half: int, microbatches: int) -> None:
    row.play("F0", 2 * (half - r - 1))
    row.play("F0 F1", r + 1)
    row.play("I1 W F1", half - r - 1)
    # At the fold, the output of a forward is the input of the other direction. The first pair cannot overlap there.
    row.play("F0 B1 F1&B0" if r == half - 1 else "F0&B1 F1&B0")
    row.play("F0&B1 F1&B0", microbatches - 2 * half + r)
    row.play("B1 F1&B0", half - r - 1)
    # The later half of the remaining backwards defer their weight gradients.
    row.play("B1 B0", (r + 1) // 2)
    row.play("I1 I0" if r % 2 else "B1 I0")
    row.play("I1 I0", r - (r + 1) // 2)
    row.play("W I0", half - r - 1)
    row.play("W", r + 1)
