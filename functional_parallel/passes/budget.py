"""Rematerialisation within a budget: as little recomputation as needed for the predicted peak to fit."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from ..errors import BudgetError
from ..program import Memory, memory_of, readable_bytes
from .base import Phase, ProgramPass, Unit
from .recompute import insert_recompute
from .remat_options import RematOption, remat_options

_WAYS_OUT = {
    "parameters": "fp.zero(3, axis) or fp.tensor_parallel, which split parameters",
    "optimizer state": "fp.zero(1, axis), which splits the optimizer's state",
    "other inputs": "a smaller batch",
    "gathered": "fp.zero(3, axis, prefetch=0), which gathers fewer layers ahead",
    "gradients": "fp.zero(2, axis), which splits gradients",
    "residuals": "fp.accumulate(n), for smaller microbatches",
    "temporaries": "fp.accumulate(n), for smaller microbatches",
}


@dataclass(frozen=True)
class RematToBudget(ProgramPass):
    """Recompute as little work as makes the peak fit; see `fp.remat`.

    The choices are a ladder that does not depend on the budget. Its predictions are checked: a copy of the program runs
    through all later passes, and the memory of the result is computed.
    """

    budget: int  # bytes per rank
    where: str = "*"  # a pattern for the layers to choose from
    name: ClassVar[str] = "remat"
    phase: ClassVar[Phase] = Phase.RECOMPUTE

    def rewrite(self, unit: Unit) -> str:
        traced, mesh = unit.program.traced, unit.program.mesh
        finished, copies = unit.program.copy()
        unit.rest(finished)
        plain = memory_of("", finished.traced)
        if plain.peak <= self.budget:
            return f"{self}: nothing is computed again, at most {readable_bytes(plain.peak)} are alive"
        rungs = remat_options(traced, finished.traced, copies, mesh, self.where)

        @functools.cache
        def memory(count: int) -> Memory:
            trial, copies = unit.program.copy()
            insert_recompute(trial.traced, {copies[node] for node in _dropped(rungs[: count + 1])})
            trial.traced.seal()
            unit.rest(trial)
            return memory_of("", trial.traced)

        reached = self._reached(rungs, lambda count: memory(count).peak)
        if memory(reached).peak > self.budget:
            raise BudgetError(_unreachable(self, plain, memory(reached)))
        insert_recompute(traced, _dropped(rungs[: reached + 1]))
        return _note(self, plain, memory(reached), rungs[1 : reached + 1])

    def _reached(self, rungs: list[RematOption], peak: Callable[[int], int]) -> int:
        """Return the index of the rung to use.

        The search starts at the first rung with a predicted peak within the budget, else at the lowest predicted peak.
        It climbs until the peak fits, then descends while the next lower rung fits too. A looser budget never ends
        higher. It starts no higher, and its climb ends at the rung that fits a tighter budget, or below.
        """
        top = min(range(len(rungs)), key=lambda index: (rungs[index].peak, index))
        place = next((index for index in range(top) if rungs[index].peak <= self.budget), top)
        while place < top and peak(place) > self.budget:
            place += 1
        while place > 0 and peak(place) <= self.budget and peak(place - 1) <= self.budget:
            place -= 1
        return place

    def __str__(self) -> str:
        return f"remat(budget={self.budget})"


def _dropped(rungs: list[RematOption]) -> set[fx.Node]:
    return {node for rung in rungs for node in rung.adds}


def _note(remat: RematToBudget, plain: Memory, chosen: Memory, rungs: list[RematOption]) -> str:
    levels = {rung.layer: rung.what for rung in rungs}  # the last rung of each layer
    counts = Counter(levels.values())
    parts = ", ".join(f"{what} of {count} {'layer' if count == 1 else 'layers'}" for what, count in counts.items())
    return (
        f"{remat}: computed again: {parts}; at most {readable_bytes(chosen.peak)} are alive, "
        f"{readable_bytes(plain.peak)} without"
    )


def _unreachable(remat: RematToBudget, plain: Memory, lowest: Memory) -> str:
    alive = {kind: size for kind, size in lowest.alive.items() if size}
    kinds = sorted(alive, key=lambda kind: -alive[kind])
    ways = dict.fromkeys(_WAYS_OUT[kind] for kind in kinds[:3])
    return (
        f"{remat}: the lowest peak that recomputation reaches is {lowest.peak} bytes ({readable_bytes(lowest.peak)}) "
        f"on a rank, {readable_bytes(lowest.peak - remat.budget)} above the budget; without it, "
        f"{readable_bytes(plain.peak)}. Alive there, at {lowest.ops[lowest.at]}: "
        f"{', '.join(f'{kind} {readable_bytes(alive[kind])}' for kind in kinds)}. Ways out: a budget of {lowest.peak}; "
        f"{'; '.join(ways)}"
    )
