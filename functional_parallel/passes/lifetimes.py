"""Lifetimes of the values of a finished program, as it is and with some values recomputed for the backward.

The program is not rewritten. Ops are numbers, and `MemoryCurve` simulates the copies that `insert_recompute` makes.
Many choices can be weighed in the time of one rewrite.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, info, operands_of
from ..program import StorageTable, recompute_cost, view_base

StorageId = tuple[int, int]  # a storage: the number of the op that allocates it, and the index of the result


@dataclass(frozen=True)
class LifetimeSummary:
    intervals: tuple[tuple[int, int, int], ...]
    work: int

    def bytes_at(self, number: int) -> int:
        return sum(size for first, last, size in self.intervals if first <= number <= last)


class Lifetimes:
    """The ops of a program by number. Copies do not read values of `elsewhere`: they are gathered again."""

    def __init__(self, traced: Traced, mesh: Mesh, elsewhere: Collection[fx.Node] = ()) -> None:
        self.storages = StorageTable("", traced)
        self.nodes = self.storages.nodes
        self.number = {node: index for index, node in enumerate(self.nodes)}
        self.elsewhere = {self.number[node] for node in elsewhere if node in self.number}
        self.backward = [bool(info(node).backward) for node in self.nodes]
        self.operands = [[self.number[v] for v in operands_of(node) if v in self.number] for node in self.nodes]
        self.users = [[self.number[user] for user in node.users if user in self.number] for node in self.nodes]
        self.base = [None if (base := view_base(node)) is None else self.number.get(base, -1) for node in self.nodes]
        self.parts = [self._parts_of(node) for node in self.nodes]
        self.size = {
            (self.number[node], index): size
            for (node, index), size in self.storages.sizes.items()
            if node in self.number
        }
        self.held = sum(size for (node, _), size in self.storages.sizes.items() if node not in self.number)
        self.outputs = {self.number[out] for out in traced.outputs if isinstance(out, fx.Node) and out in self.number}
        self._work = functools.cache(lambda value: recompute_cost(self.nodes[value], mesh))
        self.results = {part for out in traced.outputs if isinstance(out, fx.Node) for part in self._parts_of(out)}

    def _parts_of(self, node: fx.Node) -> list[StorageId]:
        return [(self.number[maker], index) for maker, index in self.storages.storages[node] if maker in self.number]

    def survey(self, members: Sequence[int], dropped: Collection[int]) -> LifetimeSummary:
        """Compute the lifetimes of the values of some forward ops, and the work of recomputation, if some are dropped.

        `members` are the numbers of these ops, in order. All other values count as saved.
        """
        inside, again = set(members), set(dropped)
        needed = self._needed(members, again)
        spans: dict[tuple[StorageId, bool], list[int]] = {}
        for value in members:
            uses = [user for user in self.users[value] if not self.backward[user]]
            for part in self.parts[value]:
                if part[0] not in inside:
                    continue
                end = len(self.nodes) if part in self.results else max(uses, default=value)
                _widen(spans, (part, False), part[0], end)
                if value in needed:
                    is_copy = value in again and part[0] in again
                    start = needed.get(part[0], needed[value])[0] if is_copy else part[0]
                    _widen(spans, (part, is_copy), start, needed[value][1])
        intervals = tuple((start, end, self.size[part]) for (part, _), (start, end) in spans.items())
        return LifetimeSummary(intervals, sum(self._work(value) for value in again if value in needed))

    def _needed(self, members: Sequence[int], again: set[int]) -> dict[int, tuple[int, int]]:
        """Return the first and the last op of the backward at which each value, or its copy, is needed."""
        needed: dict[int, tuple[int, int]] = {}
        for value in reversed(members):
            uses = [user for user in self.users[value] if self.backward[user]]
            uses += [needed[user][0] for user in self.users[value] if user in again and user in needed]
            if uses:
                needed[value] = (min(uses), max(uses))
        return needed


class MemoryCurve:
    """Bytes alive at each op, if some forward values are recomputed instead of saved: none at first.

    A copy of a value runs just before its first use in the backward.
    """

    def __init__(self, times: Lifetimes) -> None:
        self.times, self.dropped = times, set[int]()
        self._unused: set[int] = set()  # dropped values that only the backward reads
        self._copied: dict[int, int] = {}  # the op before which the copy of a dropped value runs
        self._last: dict[tuple[int, bool], int] = {}  # place of the last op that reads a value, or its copy
        self._changes: defaultdict[int, int] = defaultdict(int)  # of the bytes alive, by twice the place; odd: after it
        self._entered: dict[StorageId, list[tuple[int, int]]] = {}
        self._values: defaultdict[StorageId, list[int]] = defaultdict(list)
        for value, parts in enumerate(times.parts):
            for part in parts:
                self._values[part].append(value)
        self._enter(range(len(times.nodes)))

    def peak(self) -> tuple[int, int]:
        """Return the peak, and the number of the op at which it is reached first."""
        places = sorted(self._changes)
        alive = list(itertools.accumulate(map(self._changes.__getitem__, places), initial=self.times.held))
        peak = max(alive)
        return peak, [0, *places][alive.index(peak)] // (2 * len(self.times.nodes) + 2)

    def drop(self, values: Collection[int]) -> None:
        """Recompute these values too."""
        times, changed = self.times, set(values)
        self.dropped |= changed
        waiting = [-value for value in changed]
        heapq.heapify(waiting)
        while waiting:
            value = -heapq.heappop(waiting)
            users, before = times.users[value], (self._copied.get(value), value in self._unused)
            needed = [user if times.backward[user] else self._copied.get(user) for user in users]
            first = min((each for each in needed if each is not None), default=None)
            if first is not None:
                self._copied[value] = first
            if value not in times.outputs and all(times.backward[user] or user in self._unused for user in users):
                self._unused.add(value)
            if value in values or before != (first, value in self._unused):
                changed.add(value)
                for operand in self.dropped.intersection(times.operands[value]):
                    heapq.heappush(waiting, -operand)
        self._enter(changed.union(*(times.operands[value] for value in changed)))

    def _enter(self, values: Iterable[int]) -> None:
        for value in values:
            self._read(value)
        for part in dict.fromkeys(part for value in values for part in self.times.parts[value]):
            self._place(part)

    def _read(self, value: int) -> None:
        last = {is_copy: self._at(value, is_copy) for is_copy in self._runs(value)}
        for user in self.times.users[value]:
            for is_copy in self._runs(user):
                if not (is_copy and value in self.times.elsewhere):
                    read = value in self.dropped and (is_copy or self.times.backward[user])
                    last[read] = max(last[read], self._at(user, is_copy))
        self._last.update(((value, is_copy), place) for is_copy, place in last.items())

    def _place(self, part: StorageId) -> None:
        for place, size in self._entered.pop(part, ()):
            self._changes[place] -= size
            if not self._changes[place]:
                del self._changes[place]
        born, last = dict[bool, int](), dict[bool, int]()
        for value in self._values[part]:
            for is_copy in self._runs(value):
                lies_in_copy = self._lies_in_copy(value, is_copy)
                if value == part[0]:
                    born[lies_in_copy] = self._at(value, is_copy)
                last[lies_in_copy] = max(self._last[value, is_copy], last.get(lies_in_copy, 0))
        size = self.times.size[part]
        dies = [is_copy for is_copy in born if is_copy or part not in self.times.results]
        changes = [*((2 * born[each], size) for each in born), *((2 * last[each] + 1, -size) for each in dies)]
        self._entered[part] = changes if size else []
        for place, change in self._entered[part]:
            self._changes[place] += change

    def _runs(self, op: int) -> list[bool]:
        """Return False if the op itself runs, and True if a copy of it does."""
        return [False] * (op not in self._unused) + [True] * (op in self._copied)

    def _at(self, op: int, is_copy: bool) -> int:
        count = len(self.times.nodes)
        return self._copied[op] * (count + 1) + op if is_copy else op * (count + 1) + count

    def _lies_in_copy(self, op: int, is_copy: bool) -> bool:
        while (base := self.times.base[op]) is not None:
            if base < 0:
                return False
            is_copy = (is_copy or self.times.backward[op]) and base in self.dropped
            op = base
        return is_copy


def _widen(spans: dict[tuple[StorageId, bool], list[int]], key: tuple[StorageId, bool], start: int, end: int) -> None:
    span = spans.setdefault(key, [start, end])
    span[0], span[1] = min(span[0], start), max(span[1], end)
