"""Lifetimes of the values of a finished program, as it is and with some values recomputed or stored for the backward.

The program is not rewritten. Ops are numbers, and `MemoryCurve` simulates the copies that `insert_recompute` makes, and
the moves of `StoredResiduals`. Many choices can be weighed in the time of one rewrite.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable

from torch import fx

from ..ir import Traced, info, operands_of
from ..program import StorageTable, view_base

StorageId = tuple[int, int]  # a storage: the number of the op that allocates it, and the index of the result


class Lifetimes:
    """The ops of a program by number. Copies do not read values of `elsewhere`: they are gathered again."""

    def __init__(self, traced: Traced, elsewhere: Collection[fx.Node] = ()) -> None:
        self.storages = StorageTable("", traced)
        self.nodes = self.storages.nodes
        self.number = {node: index for index, node in enumerate(self.nodes)}
        self.elsewhere = {self.number[node] for node in elsewhere if node in self.number}
        self.backward = [bool(info(node).backward) for node in self.nodes]
        self.operands = [[self.number[v] for v in operands_of(node) if v in self.number] for node in self.nodes]
        self.users = [[self.number[user] for user in node.users if user in self.number] for node in self.nodes]
        self.base = [None if (base := view_base(node)) is None else self.number.get(base, -1) for node in self.nodes]
        self.parts = [self._parts_of(node) for node in self.nodes]
        on_device = {
            storage: size if self.storages.memories[storage[0]] == "device" else 0
            for storage, size in self.storages.sizes.items()
        }
        self.size = {
            (self.number[node], index): size for (node, index), size in on_device.items() if node in self.number
        }
        self.held = sum(size for (node, _), size in on_device.items() if node not in self.number)
        self.outputs = {self.number[out] for out in traced.outputs if isinstance(out, fx.Node) and out in self.number}
        self.results = {part for out in traced.outputs if isinstance(out, fx.Node) for part in self._parts_of(out)}

    def _parts_of(self, node: fx.Node) -> list[StorageId]:
        return [(self.number[maker], index) for maker, index in self.storages.storages[node] if maker in self.number]


class MemoryCurve:
    """Bytes alive at each op, if some forward values are recomputed or stored instead of saved: none at first.

    A copy of a value runs just before its first use in the backward. The copy of a stored value reads no operands.
    """

    def __init__(self, times: Lifetimes) -> None:
        self.times, self.dropped = times, set[int]()
        self.stored: dict[int, int] = {}  # bytes on the device of the parts of a stored value
        self.unused: set[int] = set()  # dropped values that only the backward reads
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
        """Return the peak, and the number of the op where it is reached first."""
        places = sorted(self._changes)
        alive = list(itertools.accumulate(map(self._changes.__getitem__, places), initial=self.times.held))
        peak = max(alive)
        return peak, [0, *places][alive.index(peak)] // (2 * len(self.times.nodes) + 4)

    def copy(self) -> MemoryCurve:
        other = copy.copy(self)
        for name in ("dropped", "stored", "unused", "_copied", "_last", "_changes", "_entered"):
            setattr(other, name, getattr(self, name).copy())
        return other

    @property
    def repeated(self) -> set[int]:
        """The ops that run in the forward and in the backward."""
        return self._copied.keys() - self.stored.keys() - self.unused

    def is_copied(self, value: int) -> bool:
        return value in self._copied

    def unused_with(self, values: Iterable[int]) -> set[int]:
        """Return the ops that need not run in the forward if these values are dropped too."""
        found = set(self.unused)
        for value in sorted(values, reverse=True):
            stays, users = value in self.times.outputs or value in self.stored, self.times.users[value]
            if not stays and all(self.times.backward[user] or user in found for user in users):
                found.add(value)
        return found

    def wait(self, values: Iterable[int]) -> tuple[int, int]:
        """Return the last op of the forward that reads a value, and the first op of the backward that needs it.

        `values` has its views too. Without such an op, the latter is before the former.
        """
        read, needed = -1, len(self.times.nodes)
        for value in values:
            read = max(read, value)
            for user in self.times.users[value]:
                if not self.times.backward[user] and user not in self.unused:
                    read = max(read, user)
                first = (
                    user if self.times.backward[user] else self._copied.get(user) if user not in self.stored else None
                )
                needed = min(needed, needed if first is None else first)
        return read, needed if needed < len(self.times.nodes) else -1

    def store(self, value: int, views: Collection[int], kept: int) -> None:
        """Store a value in parts, with these bytes on the device. Its views are taken again."""
        self.stored[value] = kept
        self._change({value, *views})

    def drop(self, values: Collection[int]) -> None:
        """Recompute these values too."""
        for value in values:
            self.stored.pop(value, None)
        self._change(values)

    def _change(self, values: Collection[int]) -> None:
        times, changed = self.times, set(values)
        self.dropped |= changed
        waiting, queued = [-value for value in changed], set(changed)
        heapq.heapify(waiting)
        while waiting:
            value = -heapq.heappop(waiting)
            users, before = times.users[value], (self._copied.get(value), value in self.unused)
            copied = (
                user if times.backward[user] else self._copied.get(user) for user in users if user not in self.stored
            )
            first = min((each for each in copied if each is not None), default=None)
            if first is not None:
                self._copied[value] = first
            stays = value in times.outputs or value in self.stored
            if not stays and all(times.backward[user] or user in self.unused for user in users):
                self.unused.add(value)
            if value in values or before != (first, value in self.unused):
                changed.add(value)
                for operand in self.dropped.intersection(times.operands[value]) - queued:  # all before their operands
                    queued.add(operand)
                    heapq.heappush(waiting, -operand)
        self._enter(changed.union(*(times.operands[value] for value in changed)))

    def _enter(self, values: Iterable[int]) -> None:
        for value in values:
            self._read(value)
        for part in dict.fromkeys(part for value in values for part in self.times.parts[value]):
            self._place(part)

    def _read(self, value: int) -> None:
        last = {is_copy: self._at(value, is_copy) for is_copy in self._runs(value)}
        if value in self.stored:
            last[False] += 1  # its parts are made there
        for user in self.times.users[value]:
            for is_copy in self._runs(user):
                if not (is_copy and (value in self.times.elsewhere or user in self.stored)):
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
                if value == part[0] or (is_copy and value in self.stored):
                    born[lies_in_copy] = self._at(value, is_copy)
                last[lies_in_copy] = max(self._last[value, is_copy], last.get(lies_in_copy, 0))
        size = self.times.size[part]
        dies = [is_copy for is_copy in born if is_copy or part not in self.times.results]
        changes = [*((2 * born[each], size) for each in born), *((2 * last[each] + 1, -size) for each in dies)]
        for value in self.stored.keys() & self._values[part] & self._copied.keys():
            kept, made, read = self.stored[value], self._at(value, False) + 1, self._at(value, True)
            changes += [(2 * made, kept), (2 * read + 1, -kept)]
        self._entered[part] = changes if size else []
        for place, change in self._entered[part]:
            self._changes[place] += change

    def _runs(self, op: int) -> list[bool]:
        """Return False if the op itself runs, and True if a copy of it does."""
        return [False] * (op not in self.unused) + [True] * (op in self._copied)

    def _at(self, op: int, is_copy: bool) -> int:
        count = len(self.times.nodes)
        return self._copied[op] * (count + 2) + op if is_copy else op * (count + 2) + count

    def _lies_in_copy(self, op: int, is_copy: bool) -> bool:
        while (base := self.times.base[op]) is not None and not (is_copy and op in self.stored):
            if base < 0:
                return False
            is_copy = (is_copy or self.times.backward[op]) and base in self.dropped
            op = base
        return is_copy
