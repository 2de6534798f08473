"""Choices for the residuals of a program: each is saved, recomputed, or stored in another form.

The ladder changes one residual per rung. Of the residuals that wait at the op of the peak, it changes the
residual that frees most bytes per time. This is the greedy algorithm for the multiple-choice knapsack (Sinha and
Zoltners, Operations Research 27, 1979), with a peak that moves as choices are made. The ladder does not depend on a
budget, so a looser budget stops lower on the same ladder.

What a layer hands on is a choice too: it is saved when something computed from it is recomputed.
"""

from __future__ import annotations

import fnmatch
import functools
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ..ir import Traced, forward_nodes, info, operands_of, primitive_name, reached, residuals, update_info
from .choice_costs import ChoiceCosts, Way
from .layer_index import LayerIndex, made_of_parameters
from .lifetimes import Lifetimes, MemoryCurve
from .recompute import insert_recompute
from .stored_residuals import bases, is_view, on_device

RECOMPUTED = Way()


@dataclass(frozen=True, eq=False)
class Residual:
    """A value that the backward reads, or that a layer hands on, with its views."""

    node: fx.Node
    number: int
    views: frozenset[int]
    nbytes: int
    layer: str
    ways: tuple[Way, ...]

    @functools.cached_property
    def members(self) -> frozenset[int]:
        return self.views | {self.number}


@dataclass(frozen=True)
class Rung:
    """One more choice than the rung before, and the peak that is predicted then."""

    choice: tuple[Residual, Way] | None  # none on the first rung
    peak: int


@dataclass
class Selection:
    """The residuals that are not saved, and the bytes alive then."""

    of: ResidualChoices
    curve: MemoryCurve
    ways: dict[Residual, Way] = field(default_factory=dict)

    def copy(self) -> Selection:
        return Selection(self.of, self.curve.copy(), dict(self.ways))

    def take(self, residual: Residual, way: Way) -> None:
        self.ways[residual] = way
        if way.form is None:
            self.curve.drop(self.of.numbers(self.of.again([residual], self.ways)))
        else:
            self.curve.store(residual.number, residual.views, way.kept)

    def cost(self, avoided: Collection[int] = ()) -> float:
        """Return the cost if these ops of the forward do not run."""
        again = sum(map(self.of.cost, self.curve.repeated.difference(avoided)))
        return again + sum(way.cost for residual, way in self.ways.items() if self.curve.is_copied(residual.number))


class ResidualChoices:
    """The choices of a program.

    `finished` is the program with all residuals saved, all later passes included; of a pipeline, those before the cut.
    `copies` maps nodes of `traced` to its nodes, which may have been removed since. `where` is a pattern for the paths
    of the layers to choose from.
    """

    def __init__(
        self,
        traced: Traced,
        finished: Traced,
        copies: Mapping[fx.Node, fx.Node],
        where: str,
        costs: ChoiceCosts,
    ) -> None:
        self.costs, cost = costs, costs.of_ops(finished)
        self.forward = forward_nodes(traced)
        self.layers = LayerIndex.find(traced, self.forward)
        apart = self._gathered_anyway(copies, set(finished.nodes))
        self.times = Lifetimes(finished, [copies[node] for node in apart])
        self.cost = functools.cache(lambda number: cost(self.times.nodes[number]))
        self.number = {node: self.times.number[copy] for node, copy in copies.items() if copy in self.times.number}
        self.inside = self._inside(where, apart)
        self.cheap = [node for node in self.forward if node in self.inside and self._is_cheap(node, copies[node])]
        self.residuals = self._residuals(finished, traced)
        self.of = {self.nodes[number]: each for each in self.residuals for number in each.members}

    @functools.cached_property
    def nodes(self) -> dict[int, fx.Node]:
        return {number: node for node, number in self.number.items()}

    def _inside(self, where: str, apart: Collection[fx.Node]) -> set[fx.Node]:
        chosen = {index for index, name in enumerate(self.layers.names) if fnmatch.fnmatch(name, f"*{where}")}
        return {n for n in self.forward if self.layers.of[n] in chosen and n in self.number and n not in apart}

    def _gathered_anyway(self, copies: Mapping[fx.Node, fx.Node], there: Collection[fx.Node]) -> set[fx.Node]:
        """Return gathered parameters, and values computed from them, that later passes re-gather for the backward."""
        found: set[fx.Node] = set()
        weights = made_of_parameters(self.forward)
        for node in self.forward:
            if primitive_name(node) == "all_gather" or not found.isdisjoint(operands_of(node)):
                kept = copies[node] in there and any(info(user).backward for user in copies[node].users)
                if node in weights and not kept:
                    found.add(node)
        return found

    def _is_cheap(self, node: fx.Node, copy: fx.Node) -> bool:
        """Whether a later pass recomputes a value that the backward reads."""
        return any(map(_is_backward, node.users)) and not any(map(_is_backward, copy.users))

    @property
    def count(self) -> int:
        return math.prod(len(each.ways) + 1 for each in self.residuals)

    def _residuals(self, finished: Traced, traced: Traced) -> list[Residual]:
        nodes = (self.nodes.get(self.times.number[value]) for value in residuals(finished))
        saved = bases(node for node in nodes if node is not None)
        found = [node for node in dict.fromkeys([*saved, *self.handed_on]) if node in self.inside]
        views: dict[fx.Node, set[int]] = defaultdict(set)
        for node in self.inside:
            if is_view(node):
                for base in bases([node]):
                    views[base].add(self.number[node])
        forms = self.costs.ways(on_device(found, traced))
        return [
            Residual(
                node,
                self.number[node],
                frozenset(views[node]),
                sum(self.times.size[part] for part in self.times.parts[self.number[node]]),
                self.layers.names[self.layers.of[node]],
                (RECOMPUTED, *forms.get(node, ())),
            )
            for node in sorted(found, key=self.number.__getitem__)
        ]

    @functools.cached_property
    def handed_on(self) -> dict[fx.Node, None]:
        """The values that another layer reads."""
        layer, weights = self.layers.of, made_of_parameters(self.forward)
        left = (n for n in self.forward if any(u in layer and layer[u] != layer[n] for u in n.users))
        return dict.fromkeys(node for node in bases(left) if node in layer and node not in weights)

    def numbers(self, nodes: Collection[fx.Node]) -> set[int]:
        return {self.number[node] for node in nodes}

    def again(self, recomputed: Iterable[Residual], ways: Mapping[Residual, Way]) -> dict[fx.Node, None]:
        """Return the values to recompute for some residuals, if these ones are not saved."""

        return self._down([self.nodes[number] for each in recomputed for number in sorted(each.members)], ways)

    def _down(self, values: Iterable[fx.Node], ways: Mapping[Residual, Way]) -> dict[fx.Node, None]:
        def below(value: fx.Node) -> list[fx.Node]:
            return [each for each in operands_of(value) if each in self.inside and not self._is_kept(each, ways)]

        return reached(values, below)

    def _is_kept(self, value: fx.Node, ways: Mapping[Residual, Way]) -> bool:
        return value in self.of and ways.get(self.of[value]) != RECOMPUTED

    def _with_cheap(self, dropped: Collection[fx.Node], ways: Mapping[Residual, Way]) -> Iterable[fx.Node]:
        """Add the cheap values that are computed from recomputed ones. A later pass would not find their operands."""
        above = set(dropped)
        for node in self.forward:
            if not above.isdisjoint(operands_of(node)) and not self._is_kept(node, ways):
                above.add(node)
        return self._down([*dropped, *(node for node in self.cheap if node in above)], ways)

    def dropped(self, ways: Mapping[Residual, Way]) -> dict[fx.Node, None]:
        return self.again([each for each, way in ways.items() if way.form is None], ways)

    def apply(
        self, traced: Traced, ways: Mapping[Residual, Way], copies: Mapping[fx.Node, fx.Node] | None = None
    ) -> None:
        """Rewrite the program, or a copy of it. Another pass stores what is stored in another form."""
        dropped = self._with_cheap(self.dropped(ways), ways)
        insert_recompute(traced, [node if copies is None else copies[node] for node in dropped])
        for each, way in ways.items():
            if way.form is not None:
                update_info(each.node if copies is None else copies[each.node], stored_by=str(way.form))

    def select(self, ways: Mapping[Residual, Way]) -> Selection:
        selection = Selection(self, MemoryCurve(self.times), dict(ways))
        selection.curve.drop(self.numbers(self.dropped(ways)))
        for residual, way in ways.items():
            if way.form is not None:
                selection.take(residual, way)
        return selection

    def never_recomputed(self) -> Iterator[set[int]]:
        """Yield the restrictions of the ladders to compare: none, what layers hand on, and all.

        A ladder that recomputes what a layer hands on may end where layers are recomputed from the first one on.
        """
        yield set()
        yield {each.number for each in self.residuals if each.node in self.handed_on}
        if self.costs.forms:
            yield {each.number for each in self.residuals}

    def rungs(self, kept: Collection[int]) -> Iterator[Rung]:
        """Yield a ladder. Each rung adds a choice to the rung before; the first has none. `kept` is not recomputed."""
        climb = _Climb(self, self.residuals, kept)
        peak, at = climb.selection.curve.peak()
        yield Rung(None, peak)
        while (best := climb.best(at)) is not None:
            climb.take(*best)
            peak, at = climb.selection.curve.peak()
            yield Rung(best, peak)

    def rungs_of_rank(
        self,
        kept: Collection[int],
        saved: Collection[fx.Node],
        sent: Collection[fx.Node],
        peak: int,
        in_flight: int,
    ) -> Iterator[Rung]:
        """Yield a ladder of a rank of a pipeline, of the values that it saves.

        It saves the values of `in_flight` microbatches, between forward and backward. `sent` are values that a stage
        sends to the next one, which has them anyway.
        """
        at = 1 + max((self.times.number[node] for node in residuals(self.times.storages.traced)), default=0)
        own = {self.times.number[node] for node in saved if node in self.times.number}
        kept = {*kept, *(self.times.number[node] for node in sent if node in self.times.number)}
        climb = _Climb(self, [each for each in self.residuals if not own.isdisjoint(each.members)], kept)
        yield Rung(None, peak)
        while (best := climb.best(at)) is not None:
            peak -= in_flight * climb.freed(*best)
            climb.take(*best)
            yield Rung(best, peak)

    @functools.cached_property
    def _alone(self) -> dict[Residual, list[tuple[int, float]]]:
        """The ops that recompute each residual on its own, with its share of their costs."""
        again = {each: self.numbers(self.again([each], {})) for each in self.residuals}
        sharers = Counter(number for numbers in again.values() for number in numbers)
        return {each: [(n, self.cost(n) / sharers[n]) for n in numbers] for each, numbers in again.items()}

    def avoidable(self, selection: Selection, final: Collection[Residual] = ()) -> set[int]:
        """Return the ops of the forward that only the backward needs if all other residuals are recomputed."""
        if not self._may_avoid:
            return set()
        kept = {*selection.ways, *final}
        ways = {**selection.ways, **{each: RECOMPUTED for each in self.residuals if each not in kept}}
        return selection.curve.unused_with(self.numbers(self.dropped(ways)))

    @functools.cached_property
    def _may_avoid(self) -> bool:
        return bool(MemoryCurve(self.times).unused_with(self.numbers(self.inside)))

    def least(self, selection: Selection, budget: int, final: Collection[Residual] = ()) -> float:
        """Return a lower bound of the cost of all selections within the budget that extend one.

        It is that of the bytes at the peak alone, freed in parts: a fractional knapsack. Residuals that need the same
        value to be recomputed share its cost, so that no more than its cost is counted. `final` are saved for good.
        """
        peak, at = selection.curve.peak()
        avoidable = self.avoidable(selection, final)
        again, rates = avoidable | selection.curve.repeated, list[tuple[float, int]]()
        need = peak - budget - self._freed_by(avoidable, at)
        for each in self.residuals:
            read, needed = selection.curve.wait(each.members)
            if each in selection.ways or each in final or not read <= at <= needed:
                continue
            costs = [(way.cost, each.nbytes - way.kept) for way in each.ways if way.form is not None]
            costs.append((sum(share for number, share in self._alone[each] if number not in again), each.nbytes))
            worth = [(cost / freed, freed) for cost, freed in costs if freed > 0]
            if worth:
                rates.append((min(worth)[0], max(freed for _, freed in worth)))
        total = selection.cost(avoidable)
        for rate, freed in sorted(rates):
            if need <= 0:
                break
            total, need = total + rate * min(freed, need), need - freed
        return total if need <= 0 else math.inf

    def _freed_by(self, avoided: Collection[int], at: int) -> int:
        """Return the most bytes that are freed at an op if these ops do not run: those of their operands."""
        read = {value for op in avoided if op > at for value in self.times.operands[op] if value <= at}
        return sum(self.times.size[part] for part in {part for value in read for part in self.times.parts[value]})


class _Climb:
    """A selection that grows by the choice with most bytes per cost."""

    def __init__(self, of: ResidualChoices, members: Sequence[Residual], kept: Collection[int]) -> None:
        self.of, self.members, self.kept = of, members, kept
        self.place = {each: place for place, each in enumerate(self.members)}
        self.selection = of.select({})
        self.touched: defaultdict[fx.Node, set[Residual]] = defaultdict(set)  # residuals whose cost depends on a value
        self.again: dict[Residual, tuple[dict[fx.Node, None], float]] = {}  # to recompute each, with the cost
        self.changed = list(members)  # the offers that are new, in order
        self.seen: dict[int, int] = {}  # by op, how many of them its heap has
        self.offers: dict[int, list[tuple[float, int, int]]] = {}  # heaps by op: ratio, residual and way

    def best(self, at: int) -> tuple[Residual, Way] | None:
        if at not in self.offers:
            self.offers[at] = []
            self.seen[at] = 0
        changed, self.seen[at] = self.changed[self.seen[at] :], len(self.changed)
        for each in dict.fromkeys(changed):
            self._offer(each, at)
        heap = self.offers[at]
        while heap:
            ratio, place, order = heapq.heappop(heap)
            residual = self.members[place]
            now = self._ratio(residual, residual.ways[order], at)
            if now >= -ratio:
                return residual, residual.ways[order]
            if now > 0:  # it costs more by now
                heapq.heappush(heap, (-now, place, order))
        return None

    def take(self, residual: Residual, way: Way) -> None:
        again = self.of.again([residual], {**self.selection.ways, residual: way})
        around = {each for node in again for each in (node, *operands_of(node))}
        self.selection.take(residual, way)
        changed = {residual, *(self.of.of[node] for node in around if node in self.of.of)}
        for each in changed.union(*(self.touched[node] for node in again)):
            if each in self.place:
                self.again.pop(each, None)
                self.changed.append(each)

    def freed(self, residual: Residual, way: Way) -> int:
        now = self.selection.ways.get(residual)
        return (residual.nbytes if now is None else now.kept) - way.kept

    def _offer(self, residual: Residual, at: int) -> None:
        for order, way in enumerate(residual.ways):
            ratio = self._ratio(residual, way, at)
            if ratio > 0:
                heapq.heappush(self.offers[at], (-ratio, self.place[residual], order))

    def _ratio(self, residual: Residual, way: Way, at: int) -> float:
        freed, selection = self.freed(residual, way), self.selection
        read, needed = selection.curve.wait(residual.members)
        if freed <= 0 or not read < at < needed:
            return 0.0
        cost, before = way.cost, selection.ways.get(residual)
        if way.form is None:
            if residual.number in self.kept:
                return 0.0
            again, cost = self._recomputed(residual)
            freed -= self._saved_for(again, at)
        return freed / max(cost - (before.cost if before is not None else 0), 1e-12)

    def _recomputed(self, residual: Residual) -> tuple[dict[fx.Node, None], float]:
        if residual not in self.again:
            curve = self.selection.curve
            again = self.of.again([residual], {**self.selection.ways, residual: RECOMPUTED})
            for node in again:
                self.touched[node].add(residual)
            numbers = self.of.numbers(again)
            self.again[residual] = again, sum(map(self.of.cost, numbers - curve.repeated - curve.unused_with(numbers)))
        return self.again[residual]

    def _saved_for(self, again: Collection[fx.Node], at: int) -> int:
        """Return the bytes of what layers hand on that is saved at an op only if these values are recomputed."""
        read = {self.of.of[each] for node in again for each in operands_of(node) if each in self.of.of}
        waiting = (each for each in read if each.node not in again and each.number < at)
        return sum(each.nbytes for each in waiting if self.selection.curve.wait(each.members)[1] < 0)


def _is_backward(node: fx.Node) -> bool:
    return info(node).backward
