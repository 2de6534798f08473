"""Zero-bubble schedules: weight gradients are separate from input gradients and run while a rank would be idle."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from .actions import Action, Schedule
from .domain import ranks_of
from .one_stage import one_stage_per_rank


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Build a ZB-H1 schedule: 1F1B with deferred weight gradients, at most r of them on rank r.

    >>> from functional_parallel import schedules
    >>> print(schedules.zb_h1(2, 3))
    zb-h1: 2 stages on 2 ranks, 3 microbatches
    rank 0  0F0  0F1  0I0  0W0  0F2  0I1  0W1  0I2  0W2
    rank 1  1F0  1I0  1F1  1I1  1W0  1F2  1I2  1W1  1W2

    Source: Qi et al. 2024, Zero bubble pipeline parallelism, section 2.1.

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches per step.

    Returns:
        The schedule. Every rank holds the activations of at most P microbatches.
    """
    ranks = ranks_of("zb-h1", stages, microbatches)
    rows = (_delayed(r, microbatches, ahead=ranks - 1 - r, behind=r, forward_first=True) for r in range(ranks))
    return one_stage_per_rank("zb-h1", rows, microbatches)


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Build a ZB-H2 schedule, with twice the number of forwards ahead.

    With equal costs, no rank waits between its first and its last action.

    >>> from functional_parallel import schedules
    >>> print(schedules.zb_h2(2, 3))
    zb-h2: 2 stages on 2 ranks, 3 microbatches
    rank 0  0F0  0F1  0F2  0I0  0W0  0I1  0W1  0I2  0W2
    rank 1  1F0  1I0  1F1  1I1  1F2  1I2  1W0  1W1  1W2

    Source: Qi et al. 2024, Zero bubble pipeline parallelism, section 2.2.

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches per step.

    Returns:
        The schedule. Every rank holds the activations of at most 2P − 1 microbatches.
    """
    ranks = ranks_of("zb-h2", stages, microbatches)
    rows = (_delayed(r, microbatches, 2 * (ranks - r) - 1, behind=2 * r, forward_first=False) for r in range(ranks))
    return one_stage_per_rank("zb-h2", rows, microbatches)


def _delayed(r: int, microbatches: int, ahead: int, behind: int, forward_first: bool) -> Iterator[Action]:
    forwards, inputs, weights = ([Action(kind, r, m) for m in range(microbatches)] for kind in "FIW")
    yield from forwards[:ahead]
    for i in range(microbatches):
        forward = forwards[ahead + i : ahead + i + 1]
        gradients = [inputs[i], *weights[max(0, i - behind) : max(0, i - behind + 1)]]
        yield from (*forward, *gradients) if forward_first else (*gradients, *forward)
    yield from weights[max(0, microbatches - behind) :]


def zb_v(stages: int, microbatches: int) -> Schedule:
    """Build a ZB-V schedule, with two stages per rank: rank r of P holds stages r and 2P − 1 − r.

    >>> from functional_parallel import schedules
    >>> print(schedules.zb_v(2, 2))
    zb-v: 2 stages on 1 rank, 2 microbatches
    rank 0  0F0  1F0  1I0  1W0  0F1  0I0  0W0  1F1  1I1  1W1  0I1  0W1

    Source: Qi et al. 2024, Zero bubble pipeline parallelism, section 6.

    Args:
        stages: number of stages, two per rank.
        microbatches: number of microbatches per step. With at least 2P − 1 and equal costs, no rank waits between its
            first and its last action.

    Returns:
        The schedule. Every rank holds at most 2P activations of one microbatch and stage, the memory of the first rank
        of 1F1B.
    """
    ranks = ranks_of("zb-v", stages, microbatches, 2)
    rows = (_folded(r, ranks, max(2 * ranks - 1, microbatches)) for r in range(ranks))
    kept = (tuple(action for action in row if action.microbatch < microbatches) for row in rows)
    return Schedule(tuple(kept), folded_placement(ranks), microbatches, name="zb-v")


def folded_placement(ranks: int) -> tuple[int, ...]:
    """Return the ranks of the stages of a folded pipeline: stages r and 2P − 1 − r are on rank r."""
    return (*range(ranks), *reversed(range(ranks)))


def _folded(r: int, ranks: int, microbatches: int) -> list[Action]:
    row = TwoStages(r, 2 * ranks - 1 - r)
    row.play("F0", 2 * (ranks - r) - 1)
    row.play("F1 F0", r)
    row.play("F1 I1 W1", ranks - r)
    while row.next["F", 1] < row.next["F", 0] or row.next["F", 0] < microbatches:
        if row.next["F", 0] < microbatches:
            row.play("F0")
        row.play("I0 W0 F1 I1 W1")
    row.play("I0 I1", r)
    row.play("I0 W0", ranks - r)
    row.play("W1", microbatches - row.next["W", 1])
    row.play("W0", microbatches - row.next["W", 0])
    return row.actions


class TwoStages:
    """Actions of a rank with two stages, 0 and 1. A microbatch of direction 0 reaches the rank at stage 0 first."""

    def __init__(self, *stages: int) -> None:
        self.stages = stages
        self.actions: list[Action] = []
        self.pairs: list[Action] = []
        self.next = {(kind, half): 0 for kind in "FBW" for half in (0, 1)}
        self.waiting: deque[tuple[int, int]] = deque()  # stage and microbatch of deferred weight gradients

    def play(self, words: str, times: int = 1) -> None:
        """Run actions such as "F0", "B1", overlapping ones "F0&B1", and the oldest deferred weight gradient "W"."""
        for word in times * words.split():
            first, _, second = word.partition("&")
            self._act(first)
            if second:
                self.pairs.append(self.actions[-1])
                self._act(second)

    def _act(self, word: str) -> None:
        if word == "W":
            self.actions.append(Action("W", *self.waiting.popleft()))
            return
        kind, half = word[0], int(word[1])
        counter = ("B" if kind == "I" else kind, half)
        action = Action(kind, self.stages[half], self.next[counter])
        self.next[counter] += 1
        self.actions.append(action)
        if kind == "I":
            self.waiting.append(action[1:])
