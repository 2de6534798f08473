"""Which values to compute again first: a ladder of choices, each with more recomputation than the one before.

Of each layer more and more can be computed again: what is cheap, the attention core, all but communication, all; then
also what layers hand one another. At every step the peak is found, and of the moves that free bytes there the one with
most bytes per work is taken: the greedy algorithm for the multiple-choice knapsack (Sinha and Zoltners, Operations
Research 27, 1979), with the peak moving as choices are made.

No budget is asked for, so a looser budget finds its place lower on the same ladder.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from torch import fx

from sharding_specs import Mesh

from ...tracing import Traced
from ..collectives import COMMUNICATING, primitive_name
from ..work import flops
from .gathers import stored_input
from .groups import Layers, made_of_parameters
from .lifetimes import Lifetimes, Survey
from .remat import attention_cores, inside

__all__ = ["Choice", "ladder"]


@dataclass(frozen=True)
class Choice:
    """One rung: what it computes again in addition, in which layer, and the peak that is expected then."""

    adds: frozenset[fx.Node]
    what: str
    layer: str
    peak: int


@dataclass
class _Segment:
    """A layer, and what can be computed again of it: level 0 is nothing."""

    name: str
    stem: str | None
    members: list[int]
    levels: list[tuple[str, frozenset[int], Survey]]
    level: int = 0

    @property
    def is_whole(self) -> bool:
        return self.level == len(self.levels) - 1


@dataclass(frozen=True)
class _Move:
    """A step up: of one segment to a level, or what a segment hands to the next one."""

    segments: tuple[int, ...]
    level: int
    adds: frozenset[int]
    before: Survey
    after: Survey
    length: int  # of the run of layers that it makes

    def ratio(self, at: int) -> Fraction:
        """Bytes freed at an op per unit of work."""
        freed = self.before.bytes_at(at) - self.after.bytes_at(at)
        return Fraction(freed, max(self.after.work - self.before.work, 1))


def ladder(finished: Traced, mesh: Mesh, where: str, droppable: Collection[fx.Node]) -> list[Choice]:
    """The choices, least work first.

    Args:
        finished: the program as it is without recomputation, all other passes included.
        mesh: the sizes of the axes.
        where: a pattern for the paths of the layers to choose from.
        droppable: the nodes to choose from.

    Returns:
        Rungs; each adds nodes of `finished` to those of the rungs below. The first adds none.
    """
    return list(_Ladder(finished, mesh, where, droppable).rungs())


class _Ladder:
    def __init__(self, finished: Traced, mesh: Mesh, where: str, droppable: Collection[fx.Node]) -> None:
        self.times = Lifetimes(finished, mesh)
        self.layers = Layers.find(finished, self.times.forward)
        gathered = _gathered_anyway(self.times.nodes, self.times.forward)
        self.droppable = set(droppable) - gathered
        self.members = self._members(where, gathered)
        self.segment_of = {node: index for index, nodes in enumerate(self.members) for node in nodes}
        self.segments = self._segments()
        self.between = dict(self._between())
        self.runs = [[index] for index in range(len(self.segments))]

    # --- what there is to choose from ---

    def _members(self, where: str, apart: Collection[fx.Node]) -> list[list[fx.Node]]:
        """The forward in segments: each layer of a stack is one, and so are those between, before and behind stacks."""
        keys: list[int | None] = []
        key, closed = -1, True
        for index, name in enumerate(self.layers.names):
            numbered = self.layers.is_numbered(index)
            key += numbered or closed
            closed = numbered
            keys.append(key if fnmatch.fnmatch(name, f"*{where}") else None)
        found: dict[int, list[fx.Node]] = {}
        for node in self.times.forward:
            layer = self.layers.of[node]
            segment = keys[layer] if layer >= 0 else None
            if segment is not None and node not in apart:
                found.setdefault(segment, []).append(node)
        return [nodes for _, nodes in sorted(found.items())]

    def _inside(self, run_of: Callable[[int], int]) -> set[fx.Node]:
        """What can be dropped if these runs of segments are computed again at once."""
        own = {node: self.segment_of.get(node) for node in self.times.forward}
        runs = {node: None if segment is None else run_of(segment) for node, segment in own.items()}
        return inside(self.times.forward, runs) & self.droppable

    def _segments(self) -> list[_Segment]:
        whole, cores = self._inside(lambda segment: segment), attention_cores(self.times.forward)
        return [self._segment(nodes, whole, cores) for nodes in self.members]

    def _segment(self, nodes: list[fx.Node], whole: set[fx.Node], cores: set[fx.Node]) -> _Segment:
        layer = max(self.layers.of[node] for node in nodes)
        own = [node for node in nodes if node in whole]
        quiet = [node for node in own if primitive_name(node) not in COMMUNICATING]
        cheap = [node for node in quiet if flops(node) == 0]
        members = self._numbers(nodes)
        levels = [("nothing", frozenset[int](), self.times.survey(members, ()))]
        for what, chosen in (
            ("cheap ops", cheap),
            ("cheap ops and attention cores", [*cheap, *(node for node in quiet if node in cores)]),
            ("all but communication", quiet),
            ("all", own),
        ):
            dropped = frozenset(self._numbers(chosen))
            if dropped != levels[-1][1]:
                levels.append((what, dropped, self.times.survey(members, dropped)))
        numbered = self.layers.is_numbered(layer)
        name, stem = (self.layers.names[layer], self.layers.stem(layer)) if numbered else ("outside layers", None)
        return _Segment(name, stem, members, levels)

    def _numbers(self, nodes: Iterable[fx.Node]) -> list[int]:
        return [self.times.number[node] for node in nodes]

    def _between(self) -> Iterator[tuple[int, _Move]]:
        """For each two segments of a stack that follow one another, the move that drops what one hands the other."""
        for parity in (0, 1):
            joined = set(self._numbers(self._inside(lambda segment, parity=parity: (segment + parity) // 2)))
            for first in range(parity, len(self.segments) - 1, 2):
                if self.segments[first].stem is not None and self.segments[first].stem == self.segments[first + 1].stem:
                    yield first, self._join(first, joined)

    def _join(self, first: int, joined: set[int]) -> _Move:
        a, b = self.segments[first], self.segments[first + 1]
        members, apart = a.members + b.members, a.levels[-1][1] | b.levels[-1][1]
        adds = (joined & set(members)) - apart
        before, after = self.times.survey(members, apart), self.times.survey(members, apart | adds)
        return _Move((first, first + 1), 0, frozenset(adds), before, after, 2)

    # --- choosing ---

    def rungs(self) -> Iterator[Choice]:
        dropped: set[int] = set()
        curve = self.times.curve(dropped)
        yield Choice(frozenset(), "nothing", "", curve.peak)
        while (move := self._best(curve.at)) is not None:
            dropped |= move.adds
            self._take(move)
            curve = self.times.curve(dropped)
            segment = self.segments[move.segments[0]]
            what = segment.levels[segment.level][0] if len(move.segments) == 1 else "what it hands on"
            yield Choice(frozenset(self.times.nodes[n] for n in move.adds), what, segment.name, curve.peak)

    def _best(self, at: int) -> _Move | None:
        moves = [(move.ratio(at), move) for move in self._moves()]
        useful = [(ratio, move) for ratio, move in moves if ratio > 0 and move.adds]
        if not useful:
            return None
        return min(useful, key=lambda pair: (-pair[0], pair[1].length, pair[1].segments))[1]

    def _moves(self) -> Iterator[_Move]:
        for index, segment in enumerate(self.segments):
            _, now, before = segment.levels[segment.level]
            for level in range(segment.level + 1, len(segment.levels)):
                _, then, after = segment.levels[level]
                yield _Move((index,), level, then - now, before, after, 1)
        for first, move in self.between.items():
            if self.segments[first].is_whole and self.segments[first + 1].is_whole:
                length = len(self.runs[first]) + len(self.runs[first + 1])
                yield _Move(move.segments, 0, move.adds, move.before, move.after, length)

    def _take(self, move: _Move) -> None:
        first = move.segments[0]
        if len(move.segments) == 1:
            self.segments[first].level = move.level
            return
        del self.between[first]
        run = self.runs[first] + self.runs[first + 1]
        for index in run:
            self.runs[index] = run


def _gathered_anyway(nodes: Collection[fx.Node], forward: Collection[fx.Node]) -> set[fx.Node]:
    """Gathered parameters, and what is made of them, that are gathered again for the backward whatever is chosen."""
    again = {stored_input(node) for node in nodes if primitive_name(node) == "all_gather" and node.meta["backward"]}
    found: set[fx.Node] = set()
    weights = made_of_parameters(forward)
    for node in forward:
        if node not in weights:
            continue
        if primitive_name(node) == "all_gather" and stored_input(node) in again - {None}:
            found.add(node)
        elif any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found
