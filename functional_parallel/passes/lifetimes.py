"""Lifetimes of the values of a finished program, as it is and with some values recomputed for the backward.

The program is not rewritten. Ops are numbers, and `Lifetimes.curve` simulates the copies that `insert_recompute` makes.
Many choices can be weighed in the time of one rewrite.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, info, operands_of
from ..program import StorageTable, recompute_cost, view_base
from .recompute import missing_values

StorageId = tuple[int, int]  # a storage: the number of the op that allocates it, and the index of the result


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes alive at each op, copies included, and the number of each op. A copy has the number of its first user."""

    bytes: list[int]
    numbers: list[int]

    @property
    def peak(self) -> int:
        return max(self.bytes, default=0)

    @property
    def at(self) -> int:
        """Number of the op at which the peak is reached first."""
        return self.numbers[self.bytes.index(self.peak)] if self.bytes else 0


@dataclass(frozen=True)
class LifetimeSummary:
    intervals: tuple[tuple[int, int, int], ...]
    work: int

    def bytes_at(self, number: int) -> int:
        return sum(size for first, last, size in self.intervals if first <= number <= last)


class Lifetimes:
    """The ops of a program by number. Copies do not read values of `elsewhere`: they are gathered again."""

    def __init__(self, traced: Traced, mesh: Mesh, elsewhere: Collection[fx.Node] = ()) -> None:
        self.mesh, self.storages = mesh, StorageTable("", traced)
        self.nodes = self.storages.nodes
        self.number = {node: index for index, node in enumerate(self.nodes)}
        self._elsewhere = {self.number[node] for node in elsewhere if node in self.number}
        self._backward = [bool(info(node).backward) for node in self.nodes]
        self._operands = [[self.number[v] for v in operands_of(node) if v in self.number] for node in self.nodes]
        self._users = [[self.number[user] for user in node.users if user in self.number] for node in self.nodes]
        self._base = [None if (base := view_base(node)) is None else self.number.get(base, -1) for node in self.nodes]
        self._parts = [self._parts_of(node) for node in self.nodes]
        self._size = {
            (self.number[node], index): size
            for (node, index), size in self.storages.sizes.items()
            if node in self.number
        }
        self._held = sum(size for (node, _), size in self.storages.sizes.items() if node not in self.number)
        self._outputs = {self.number[out] for out in traced.outputs if isinstance(out, fx.Node) and out in self.number}
        self._results = {part for out in traced.outputs if isinstance(out, fx.Node) for part in self._parts_of(out)}

    def _parts_of(self, node: fx.Node) -> list[StorageId]:
        return [(self.number[maker], index) for maker, index in self.storages.storages[node] if maker in self.number]

    def curve(self, dropped: Collection[int]) -> MemoryCurve:
        """Compute the bytes alive at each op, if these forward values were recomputed instead of saved."""
        first: dict[tuple[int, int, bool], int] = {}
        last: dict[tuple[int, int, bool], int] = {}
        read: dict[tuple[int, bool], int] = {}  # an op may have all new parameters as results
        numbers = []
        for time, (number, op, values) in enumerate(self._ops(set(dropped))):
            numbers.append(number)
            read.update(dict.fromkeys(values, time))
            for part in self._parts[op]:
                if part[0] == op:
                    first.setdefault((*part, values[0][1]), time)
        for (value, is_copied), time in read.items():
            for part in self._parts[value]:
                key = (*part, is_copied)
                last[key] = max(time, last.get(key, 0))
        changes = [0] * (len(numbers) + 1)
        for key, born in first.items():
            size = self._size[key[:2]]
            changes[born] += size
            if key[2] or key[:2] not in self._results:
                changes[last[key] + 1] -= size
        return MemoryCurve([self._held + alive for alive in itertools.accumulate(changes[:-1])], numbers)

    def _ops(self, dropped: set[int]) -> Iterator[tuple[int, int, list[tuple[int, bool]]]]:
        """Yield, for each op that would run: its position, the op, and its values, each with whether a copy owns it.

        A copy has the position of the op that needs it.
        """
        copied: set[int] = set()
        lies_in_copy: dict[tuple[int, bool], bool] = {}  # per value or copy: whether a copy allocated its storage

        def touched(op: int, is_copy: bool) -> list[tuple[int, bool]]:
            takes_copies = self._backward[op] or is_copy
            taken = [value for value in self._operands[op] if not is_copy or value not in self._elsewhere]
            values = [(value, takes_copies and value in copied) for value in taken]
            base = self._base[op]
            lies_in_copy[op, is_copy] = (
                is_copy if base is None else lies_in_copy.get((base, takes_copies and base in copied), False)
            )
            return [(value[0], lies_in_copy[value]) for value in [(op, is_copy), *values]]

        unused = self._unused(dropped)
        for number in range(len(self.nodes)):
            if self._backward[number]:
                missing = missing_values(number, self._operands.__getitem__, dropped, copied)
                copied |= missing
                for copy in sorted(missing):
                    yield number, copy, touched(copy, True)
            if number not in unused:
                yield number, number, touched(number, False)

    def _unused(self, dropped: set[int]) -> set[int]:
        unused: set[int] = set()
        for number in sorted(dropped, reverse=True):
            users = self._users[number]
            if number not in self._outputs and all(self._backward[user] or user in unused for user in users):
                unused.add(number)
        return unused

    def survey(self, members: Sequence[int], dropped: Collection[int]) -> LifetimeSummary:
        """Compute the lifetimes of the values of some forward ops, and the work of recomputation, if some are dropped.

        `members` are the numbers of these ops, in order. All other values count as saved.
        """
        inside, again = set(members), set(dropped)
        needed = self._needed(members, again)
        spans: dict[tuple[StorageId, bool], list[int]] = {}
        for value in members:
            uses = [user for user in self._users[value] if not self._backward[user]]
            for part in self._parts[value]:
                if part[0] not in inside:
                    continue
                end = len(self.nodes) if part in self._results else max(uses, default=value)
                _widen(spans, (part, False), part[0], end)
                if value in needed:
                    is_copy = value in again and part[0] in again
                    start = needed.get(part[0], needed[value])[0] if is_copy else part[0]
                    _widen(spans, (part, is_copy), start, needed[value][1])
        intervals = tuple((start, end, self._size[part]) for (part, _), (start, end) in spans.items())
        return LifetimeSummary(
            intervals, sum(recompute_cost(self.nodes[value], self.mesh) for value in again if value in needed)
        )

    def _needed(self, members: Sequence[int], again: set[int]) -> dict[int, tuple[int, int]]:
        """Return the first and the last op of the backward at which each value, or its copy, is needed."""
        needed: dict[int, tuple[int, int]] = {}
        for value in reversed(members):
            uses = [user for user in self._users[value] if self._backward[user]]
            uses += [needed[user][0] for user in self._users[value] if user in again and user in needed]
            if uses:
                needed[value] = (min(uses), max(uses))
        return needed


def _widen(spans: dict[tuple[StorageId, bool], list[int]], key: tuple[StorageId, bool], start: int, end: int) -> None:
    span = spans.setdefault(key, [start, end])
    span[0], span[1] = min(span[0], start), max(span[1], end)
