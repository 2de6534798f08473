"""Order the values to recompute: a ladder of choices, each with more recomputation than the one before.

Each layer has growing sets of values to recompute: cheap ops, the attention core, all ops except communication, all
ops. The last choice is the values passed between layers. The peak is computed at every step. Among the moves that free
bytes there, the one with the most bytes per work is taken. This is the greedy algorithm for the multiple-choice
knapsack (Sinha and Zoltners, Operations Research 27, 1979), with a peak that moves as choices are made.

The ladder does not depend on a budget, so a looser budget stops lower on the same ladder.
"""

from __future__ import annotations

import fnmatch
import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from torch import fx

from sharding_specs import Mesh

from ..collectives import COMMUNICATING
from ..ir import Traced, forward_nodes, info, operands_of, primitive_name, residuals
from ..program import flops
from .layer_index import LayerIndex, made_of_parameters
from .lifetimes import Lifetimes, LifetimeSummary, MemoryCurve
from .rematerialize import attention_cores, recomputable


@dataclass(frozen=True)
class RematOption:
    """One rung: the values that it recomputes in addition, in one layer, and the peak that is predicted then."""

    adds: frozenset[fx.Node]
    what: str
    layer: str
    peak: int


_CHEAP = ("nothing", "cheap ops")


@dataclass
class _Segment:
    name: str  # its path
    stem: str  # the path of the stack that it belongs to; empty outside stacks
    members: list[int]  # its values, by number
    levels: list[tuple[str, frozenset[int]]]  # growing sets of its inner values, each with a name; level 0 is empty
    exits: frozenset[int]  # cheap values that other layers read
    state: tuple[int, bool] = (0, False)  # the level chosen, and whether exits are recomputed too

    @property
    def is_whole(self) -> bool:
        return self.state[0] == len(self.levels) - 1

    def states(self) -> Iterator[tuple[int, bool]]:
        level, out = self.state
        yield from ((higher, out) for higher in range(level + 1, len(self.levels)))
        if self.exits and not out:
            yield from ((cheap, True) for cheap in range(level, len(self.levels)) if self.levels[cheap][0] in _CHEAP)

    def dropped(self, state: tuple[int, bool]) -> frozenset[int]:
        return self.levels[state[0]][1] | (self.exits if state[1] else frozenset())

    def what(self) -> str:
        level, out = self.state
        inner = self.levels[level][0]
        return inner if not out else "cheap results" if level == 0 else f"{inner}, and cheap results,"


@dataclass(frozen=True)
class _Move:
    """A step up the ladder: of one segment to a state, or of two segments by the values passed between them."""

    segments: tuple[int, ...]
    state: tuple[int, bool]
    adds: frozenset[int]
    before: LifetimeSummary
    after: LifetimeSummary
    length: int  # number of layers of the resulting run

    def ratio(self, at: int) -> Fraction:
        freed = self.before.bytes_at(at) - self.after.bytes_at(at)
        return Fraction(freed, max(self.after.work - self.before.work, 1))


_Offer = tuple[Fraction, int, tuple[int, ...], int, int, _Move]  # by which moves are chosen, and its version


class RematLadder:
    """The choices of a program, least work first.

    `finished` is the program without recomputation, all later passes included; of a pipeline, those before the cut.
    `copies` maps nodes of `traced` to its nodes, which may have been removed since. `where` is a pattern for the paths
    of the layers to choose from.
    """

    def __init__(
        self, traced: Traced, finished: Traced, copies: Mapping[fx.Node, fx.Node], mesh: Mesh, where: str
    ) -> None:
        self.forward = forward_nodes(traced)
        self.layers = LayerIndex.find(traced, self.forward)
        apart = self._gathered_anyway(copies, set(finished.nodes))
        self.times = Lifetimes(finished, mesh, [copies[node] for node in apart])
        self.number = {node: self.times.number[copy] for node, copy in copies.items() if copy in self.times.number}
        self.node = {number: node for node, number in self.number.items()}
        self.members = self._members(where, apart)
        self.segment_of = {node: index for index, nodes in enumerate(self.members) for node in nodes}
        whole, cores = self._inside(range(len(self.members))), attention_cores(self.forward)
        self.segments = [self._segment(nodes, whole, cores) for nodes in self.members]
        self.between = dict(self._between())
        self.surveys: dict[tuple[int, tuple[int, bool]], LifetimeSummary] = {}
        self.runs = [[index] for index in range(len(self.segments))]
        self.versions = [0] * len(self.segments)  # an offer of an earlier version no longer holds
        self.offers: dict[tuple[int, frozenset[int] | None], list[_Offer]] = {}  # heaps, by the arguments of `_best`

    def _members(self, where: str, apart: Collection[fx.Node]) -> list[list[fx.Node]]:
        chosen = {index for index, name in enumerate(self.layers.names) if fnmatch.fnmatch(name, f"*{where}")}
        found: dict[int, list[fx.Node]] = {}
        for node in self.forward:
            if self.layers.of[node] in chosen and node in self.number and node not in apart:
                found.setdefault(self.layers.of[node], []).append(node)
        return [nodes for _, nodes in sorted(found.items())]

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

    def _inside(self, runs: Sequence[int]) -> set[fx.Node]:
        own = {node: self.segment_of.get(node) for node in self.forward}
        return recomputable(self.forward, {node: None if index is None else runs[index] for node, index in own.items()})

    def _segment(self, nodes: list[fx.Node], whole: set[fx.Node], cores: set[fx.Node]) -> _Segment:
        layer = self.layers.of[nodes[0]]
        own = [node for node in nodes if node in whole]
        quiet = [node for node in own if primitive_name(node) not in COMMUNICATING]
        cheap = [node for node in quiet if flops(node) == 0]
        exits = [node for node in nodes if node not in whole and flops(node) == 0 and primitive_name(node) is None]
        levels = [("nothing", frozenset[int]())]
        for what, chosen in (
            ("cheap ops", cheap),
            ("cheap ops and attention cores", [*cheap, *(node for node in quiet if node in cores)]),
            ("all" if quiet == own else "all but communication", quiet),
            ("all", own),
        ):
            if len(chosen) > len(levels[-1][1]):
                levels.append((what, frozenset(self._numbers(chosen))))
        stem = self.layers.stem(layer) if self.layers.is_numbered(layer) else ""
        return _Segment(self.layers.names[layer], stem, self._numbers(nodes), levels, frozenset(self._numbers(exits)))

    def _numbers(self, nodes: Iterable[fx.Node]) -> list[int]:
        return [self.number[node] for node in nodes]

    def _between(self) -> Iterator[tuple[int, _Move]]:
        for parity in (0, 1):
            joined = self._inside([(index + parity) // 2 for index in range(len(self.segments))])
            for first in range(parity, len(self.segments) - 1, 2):
                if self.segments[first].stem == self.segments[first + 1].stem:
                    yield first, self._join(first, joined)

    def _join(self, first: int, joined: set[fx.Node]) -> _Move:
        a, b = self.segments[first], self.segments[first + 1]
        members, apart = a.members + b.members, a.levels[-1][1] | b.levels[-1][1]
        adds = {number for number in members if self.node[number] in joined} - apart
        before, after = self.times.survey(members, apart), self.times.survey(members, apart | adds)
        return _Move((first, first + 1), (0, False), frozenset(adds), before, after, 2)

    def rungs(self) -> Iterator[RematOption]:
        """Yield the choices. Each adds nodes to those before it; the first adds none."""
        curve = MemoryCurve(self.times)
        peak, at = curve.peak()
        yield RematOption(frozenset(), "nothing", "", peak)
        while (move := self._best(at)) is not None:
            curve.drop(move.adds)
            peak, at = curve.peak()
            yield self._taken(move, peak)

    def rungs_of_rank(
        self, saved: Collection[fx.Node], sent: Collection[fx.Node], peak: int, in_flight: int
    ) -> Iterator[RematOption]:
        """Yield the choices of a rank of a pipeline, among the layers of which it saves values.

        It saves the values of `in_flight` microbatches, between forward and backward. `sent` are values that a stage
        sends to the next one, which has them anyway.
        """
        kept = {self.times.number[node] for node in sent if node in self.times.number}
        at = max((self.times.number[node] for node in residuals(self.times.storages.traced)), default=0)
        own = {self.times.number[node] for node in saved if node in self.times.number}
        members = frozenset(i for i, segment in enumerate(self.segments) if not own.isdisjoint(segment.members))
        yield RematOption(frozenset(), "nothing", "", peak)
        while (move := self._best(at, members)) is not None:
            peak -= in_flight * (move.before.bytes_at(at) - move.after.bytes_at(at))
            yield self._taken(replace(move, adds=move.adds - kept), peak)

    def _best(self, at: int, members: frozenset[int] | None = None) -> _Move | None:
        """Return the move that frees most bytes at an op per work, of these segments or of all."""
        if (at, members) not in self.offers:
            self.offers[at, members] = []
            for index in range(len(self.segments)):
                self._offer(index, at, members)
        heap = self.offers[at, members]
        while heap:
            *_, version, move = heapq.heappop(heap)
            if version == self.versions[move.segments[0]]:
                return move
        return None

    def _offer(self, index: int, at: int, members: frozenset[int] | None) -> None:
        for order, move in enumerate(self._moves(index)):
            ratio = move.ratio(at)
            if ratio > 0 and (members is None or members.issuperset(move.segments)):
                offer = (-ratio, move.length, move.segments, order, self.versions[index], move)
                heapq.heappush(self.offers[at, members], offer)

    def _moves(self, index: int) -> Iterator[_Move]:
        segment = self.segments[index]
        now, before = segment.dropped(segment.state), self._survey(index, segment.state)
        for state in segment.states():
            yield _Move((index,), state, segment.dropped(state) - now, before, self._survey(index, state), 1)
        if index in self.between and segment.is_whole and self.segments[index + 1].is_whole:
            length = len(self.runs[index]) + len(self.runs[index + 1])
            yield replace(self.between[index], length=length)

    def _survey(self, index: int, state: tuple[int, bool]) -> LifetimeSummary:
        if (index, state) not in self.surveys:
            segment = self.segments[index]
            self.surveys[index, state] = self.times.survey(segment.members, segment.dropped(state))
        return self.surveys[index, state]

    def _taken(self, move: _Move, peak: int) -> RematOption:
        first, what = move.segments[0], "all, and what it hands on,"
        changed = {first - 1, first}
        if len(move.segments) == 1:
            self.segments[first].state = move.state
            what = self.segments[first].what()
        else:
            del self.between[first]
            run = self.runs[first] + self.runs[first + 1]
            for index in run:
                self.runs[index] = run
            changed |= {run[0] - 1, run[-1]}
        for index in changed.intersection(range(len(self.segments))):
            self.versions[index] += 1
            for at, members in self.offers:
                self._offer(index, at, members)
        return RematOption(frozenset(self.node[n] for n in move.adds), what, self.segments[first].name, peak)
