"""One choice per residual within a budget: as little time as needed for the predicted peak to fit."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from ..errors import BudgetError
from ..ir import forward_nodes, update_info
from ..program import WAYS_OUT, Hardware, MemoryUse
from ..quantities import readable_bytes
from .best_choice import LARGEST, cheapest
from .choice_costs import ChoiceCosts, Way
from .moved_residuals import MovedResiduals
from .program_pass import Completed, Phase, ProgramPass, Settings, Unit
from .residual_choices import Residual, ResidualChoices, Rung
from .stored_residuals import StoredResiduals

Ways = Mapping[Residual, Way]
_AGAIN = "computed again"
Tried = Callable[[Ways], tuple[MemoryUse, ...]]
_TRIALS = 8  # of the cheapest selections by prediction, those that are checked


@dataclass(frozen=True)
class RematToBudget(ProgramPass):
    """Save, recompute, move or split each residual, in the least time with a peak that fits; see `fp.remat`.

    The choice for a small program is the best one. For others it is a rung of a ladder that does not depend on the
    budget; in a pipeline, one of each rank. Predictions are checked: a copy of the program runs through all later
    passes, and the memory of the result is computed.
    """

    budget: int  # bytes per rank
    where: str = "*"  # a pattern for the layers to choose from
    hardware: Hardware | None = field(default=None, hash=False)  # whose times are the costs; None for fixed rates
    name: ClassVar[str] = "remat"
    phase: ClassVar[Phase] = Phase.RECOMPUTE

    def rewrite(self, unit: Unit) -> str:
        costs = ChoiceCosts(unit.program.mesh, self.hardware, self._forms(unit.settings))
        for node in forward_nodes(unit.program.traced) if costs.forms else ():
            update_info(node, stored_by="")
        finished, copies = unit.program.copy()
        unit.rest(finished)
        choices = ResidualChoices(unit.program.traced, finished.traced, copies, self.where, costs)
        last, of = finished.copy()
        plain = unit.complete(last)
        if _peak(plain.memories) <= self.budget:
            return f"{self}: every residual is saved, at most {readable_bytes(_peak(plain.memories))} are alive"
        known: dict[frozenset[tuple[Residual, Way]], tuple[MemoryUse, ...]] = {}

        def tried(ways: Ways) -> tuple[MemoryUse, ...]:
            key = frozenset(ways.items())
            if key not in known:
                trial, copies = unit.program.copy()
                choices.apply(trial.traced, ways, copies)
                trial.traced.seal()
                unit.rest(trial)
                known[key] = unit.complete(trial).memories
            return known[key]

        ways, is_least = self._chosen(choices, plain, of, tried)
        if _peak(tried(ways)) > self.budget:
            lowest = min(known, key=lambda key: _peak(known[key]))
            ways = dict(sorted(lowest, key=lambda each: each[0].number))
            raise BudgetError(_unreachable(self, plain.memories, known[lowest], list(_lines(choices, ways))))
        choices.apply(unit.program.traced, ways)
        alive = (
            f"at most {readable_bytes(_peak(tried(ways)))} are alive, {readable_bytes(_peak(plain.memories))} without"
        )
        bound = [] if plain.saved else [self._gap(choices, ways, is_least)]
        return "\n  ".join([f"{self}: {alive}", *_lines(choices, ways), *bound])

    def _chosen(
        self, choices: ResidualChoices, plain: Completed, of: Mapping[fx.Node, fx.Node], tried: Tried
    ) -> tuple[Ways, bool]:
        """Return the choice to make, and whether it is known to cost least; else one of the lowest peak reached."""
        is_small = not plain.saved and choices.count <= LARGEST
        if is_small and (best := self._best(choices, tried, self.budget)) is not None:
            return best, True
        found = [self._on_ladder(ladders, tried) for ladders in _ladders(choices, plain, of)]
        ways = min(found, key=lambda ways: (max(_peak(tried(ways)), self.budget), choices.select(ways).cost()))
        while is_small and _peak(tried(ways)) > self.budget:
            lower = self._best(choices, tried, _peak(tried(ways)) - 1)
            if lower is None:
                break
            ways = lower
        return ways, False

    def _gap(self, choices: ResidualChoices, ways: Ways, is_least: bool) -> str:
        cost, readable = choices.select(ways).cost(), choices.costs.readable
        if is_least or not cost:
            return f"{readable(cost)} in all, and no choice takes less"
        least = choices.least(choices.select({}), self.budget)
        return f"{readable(cost)} in all; no choice takes less than {readable(least)}, {1 - least / cost:.0%} below"

    def _forms(self, settings: Settings) -> list[StoredResiduals]:
        asked = (each for each in settings.requested if each.name not in settings.options.without)
        forms = [each for each in asked if isinstance(each, StoredResiduals)]
        for each in forms:
            each.check(settings)
            if isinstance(each, MovedResiduals) and each.fraction < 1:
                raise ValueError(
                    f"{self}: the budget decides which activations move, so {each} takes no "
                    f"fraction={each.fraction:g}; leave out the fraction, or the budget"
                )
        return forms

    def _best(self, choices: ResidualChoices, tried: Tried, budget: int) -> Ways | None:
        for selection in itertools.islice(cheapest(choices, budget), _TRIALS):
            if _peak(tried(selection.ways)) <= budget:
                return selection.ways
        return None

    def _on_ladder(self, ladders: list[list[Rung]], tried: Tried) -> Ways:
        """Return the choices up to the rung to use, for each rank.

        It is found by bisection below the lowest predicted peak. A looser budget never ends higher: it takes the same
        rungs to try, up to one that fits it and not the tighter budget, and goes on below that rung.
        """
        tops = [min(range(len(rungs)), key=lambda index: (rungs[index].peak, index)) for rungs in ladders]
        low, high = [0] * len(tops), tops
        while low != high:
            middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
            fits = [memory.peak <= self.budget for memory in tried(_taken(ladders, middle))]
            low = [a if fit or a == b else at + 1 for a, b, at, fit in zip(low, high, middle, fits, strict=True)]
            high = [at if fit else b for b, at, fit in zip(high, middle, fits, strict=True)]
        return _taken(ladders, high)

    def __str__(self) -> str:
        return f"remat(budget={self.budget})"


def _ladders(choices: ResidualChoices, plain: Completed, of: Mapping[fx.Node, fx.Node]) -> Iterator[list[list[Rung]]]:
    """Yield ladders to compare, in a pipeline one of each rank."""
    named = {copy: node for node, copy in of.items()}
    sent, *saved = ([named[node] for node in each if node in named] for each in (plain.sent, *plain.saved))
    for kept in choices.never_recomputed():
        ranks = zip(saved, plain.memories, plain.in_flight, strict=False)  # none without a pipeline
        found = [list(choices.rungs_of_rank(kept, own, sent, memory.peak, count)) for own, memory, count in ranks]
        yield found or [list(choices.rungs(kept))]


def _taken(ladders: list[list[Rung]], places: Sequence[int]) -> Ways:
    return dict(
        rung.choice
        for rungs, place in zip(ladders, places, strict=True)
        for rung in rungs[1 : place + 1]
        if rung.choice
    )


def _peak(memories: Sequence[MemoryUse]) -> int:
    return max(memory.peak for memory in memories)


def _lines(choices: ResidualChoices, ways: Ways) -> Iterator[str]:
    """Describe the residuals of each kind, with their bytes and what they cost."""
    kinds = defaultdict[str, list[Residual]](list)
    costs = {_AGAIN: choices.select(ways).cost()}
    for residual, way in ways.items():
        kind = str(way.form or _AGAIN)
        kinds[kind].append(residual)
        costs[kind] = costs.get(kind, 0) + way.cost
        costs[_AGAIN] -= way.cost
    for kind, found in kinds.items():
        size, layers = readable_bytes(sum(each.nbytes for each in found)), len({each.layer for each in found})
        values, where = "value" if len(found) == 1 else "values", "layer" if layers == 1 else "layers"
        yield f"{kind}: {len(found)} {values} of {size} in {layers} {where}, {choices.costs.readable(costs[kind])}"


def _unreachable(
    remat: RematToBudget, plain: Sequence[MemoryUse], memories: Sequence[MemoryUse], choice: Sequence[str]
) -> str:
    lowest = max(memories, key=lambda memory: memory.peak)
    alive = {kind: size for kind, size in lowest.alive.items() if size}
    kinds = sorted(alive, key=lambda kind: -alive[kind])
    ways = dict.fromkeys(WAYS_OUT[kind] for kind in kinds[:3])
    rank = f"rank {memories.index(lowest)} of the pipeline" if len(memories) > 1 else "a rank"
    by = f" The choice is {'; '.join(choice)}." if choice else ""
    return (
        f"{remat}: the lowest peak that a choice reaches is {lowest.peak} bytes ({readable_bytes(lowest.peak)}) on "
        f"{rank}, {readable_bytes(lowest.peak - remat.budget)} above the budget; without it, "
        f"{readable_bytes(_peak(plain))}.{by} Alive there, at {lowest.ops[lowest.at]}: "
        f"{', '.join(f'{kind} {readable_bytes(alive[kind])}' for kind in kinds)}. Ways out: a budget of {lowest.peak}; "
        f"{'; '.join(ways)}"
    )
