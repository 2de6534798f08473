"""Rematerialisation within a budget: as little recomputation as needed for the predicted peak to fit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..errors import BudgetError
from ..program import WAYS_OUT, MemoryUse
from ..quantities import readable_bytes
from .program_pass import Phase, ProgramPass, Unit
from .recompute import insert_recompute
from .remat_options import RematLadder, RematOption


@dataclass(frozen=True)
class RematToBudget(ProgramPass):
    """Recompute as little work as makes the peak fit; see `fp.remat`.

    The choices are a ladder that does not depend on the budget; in a pipeline, one of each rank. Their predictions are
    checked: a copy of the program runs through all later passes, and the memory of the result is computed.
    """

    budget: int  # bytes per rank
    where: str = "*"  # a pattern for the layers to choose from
    name: ClassVar[str] = "remat"
    phase: ClassVar[Phase] = Phase.RECOMPUTE

    def rewrite(self, unit: Unit) -> str:
        finished, copies = unit.program.copy()
        unit.rest(finished)
        ladder = RematLadder(unit.program.traced, finished.traced, copies, unit.program.mesh, self.where)
        last, of = finished.copy()
        plain = unit.complete(last)
        if _peak(plain.memories) <= self.budget:
            return f"{self}: nothing is computed again, at most {readable_bytes(_peak(plain.memories))} are alive"
        named = {copy: node for node, copy in of.items()}
        sent, *saved = ([named[node] for node in each if node in named] for each in (plain.sent, *plain.saved))
        ranks = zip(saved, plain.memories, plain.in_flight, strict=False)  # none without a pipeline
        ladders = [list(ladder.rungs_of_rank(own, sent, memory.peak, count)) for own, memory, count in ranks]
        ladders = ladders or [list(ladder.rungs())]

        @functools.cache
        def memories(places: tuple[int, ...]) -> tuple[MemoryUse, ...]:
            trial, copies = unit.program.copy()
            insert_recompute(trial.traced, {copies[node] for node in _dropped(_taken(ladders, places))})
            trial.traced.seal()
            unit.rest(trial)
            return unit.complete(trial).memories

        reached = self._reached(ladders, memories)
        taken, found = _taken(ladders, reached), memories(reached)
        if _peak(found) > self.budget:
            raise BudgetError(_unreachable(self, plain.memories, found))
        insert_recompute(unit.program.traced, _dropped(taken))
        return _note(self, plain.memories, found, taken)

    def _reached(
        self, ladders: list[list[RematOption]], memories: Callable[[tuple[int, ...]], tuple[MemoryUse, ...]]
    ) -> tuple[int, ...]:
        """Return the index of the rung to use, for each rank.

        The search starts at the first rung with a predicted peak within the budget, else at the lowest predicted peak.
        It climbs until the peak fits, then descends while the next lower rung fits too. A looser budget never ends
        higher. It starts no higher, and its climb ends at the rung that fits a tighter budget, or below.
        """
        tops = [min(range(len(rungs)), key=lambda index: (rungs[index].peak, index)) for rungs in ladders]
        fit = [
            next((index for index in range(top) if rungs[index].peak <= self.budget), top)
            for rungs, top in zip(ladders, tops, strict=True)
        ]

        def over(places: Sequence[int]) -> list[bool]:
            return [memory.peak > self.budget for memory in memories(tuple(places))]

        while any(climbs := [high and place < top for high, place, top in zip(over(fit), fit, tops, strict=True)]):
            fit = [place + climb for place, climb in zip(fit, climbs, strict=True)]
        is_settled = over(fit)
        while any(down := [place > 0 and not settled for place, settled in zip(fit, is_settled, strict=True)]):
            lower = [place - step for place, step in zip(fit, down, strict=True)]
            if any(high and step for high, step in zip(over(lower), down, strict=True)):
                is_settled = [settled or high for settled, high in zip(is_settled, over(lower), strict=True)]
            else:
                fit = lower
        return tuple(fit)

    def __str__(self) -> str:
        return f"remat(budget={self.budget})"


def _peak(memories: Sequence[MemoryUse]) -> int:
    return max(memory.peak for memory in memories)


def _taken(ladders: list[list[RematOption]], places: tuple[int, ...]) -> list[RematOption]:
    return [rung for rungs, place in zip(ladders, places, strict=True) for rung in rungs[1 : place + 1]]


def _dropped(rungs: list[RematOption]) -> set[fx.Node]:
    return {node for rung in rungs for node in rung.adds}


def _note(
    remat: RematToBudget, plain: Sequence[MemoryUse], chosen: Sequence[MemoryUse], rungs: list[RematOption]
) -> str:
    levels = {rung.layer: rung.what for rung in rungs}  # the last rung of each layer
    counts = Counter(levels.values())
    parts = ", ".join(f"{what} of {count} {'layer' if count == 1 else 'layers'}" for what, count in counts.items())
    return (
        f"{remat}: computed again: {parts}; at most {readable_bytes(_peak(chosen))} are alive, "
        f"{readable_bytes(_peak(plain))} without"
    )


def _unreachable(remat: RematToBudget, plain: Sequence[MemoryUse], memories: Sequence[MemoryUse]) -> str:
    lowest = max(memories, key=lambda memory: memory.peak)
    alive = {kind: size for kind, size in lowest.alive.items() if size}
    kinds = sorted(alive, key=lambda kind: -alive[kind])
    ways = dict.fromkeys(WAYS_OUT[kind] for kind in kinds[:3])
    rank = f"rank {memories.index(lowest)} of the pipeline" if len(memories) > 1 else "a rank"
    return (
        f"{remat}: the lowest peak that recomputation reaches is {lowest.peak} bytes ({readable_bytes(lowest.peak)}) "
        f"on {rank}, {readable_bytes(lowest.peak - remat.budget)} above the budget; without it, "
        f"{readable_bytes(_peak(plain))}. Alive there, at {lowest.ops[lowest.at]}: "
        f"{', '.join(f'{kind} {readable_bytes(alive[kind])}' for kind in kinds)}. Ways out: a budget of {lowest.peak}; "
        f"{'; '.join(ways)}"
    )
