"""Cheap forward values are computed again for the backward where that surely frees memory.

An activation's result is kept for the gradient of the weight behind it, and the activation's operand for the gradient
of the activation itself, though the one follows from the other in no time; a norm's result follows from its operand,
kept too. Computing such values again is what arXiv 1604.06174 §3 proposes for cheap ops. Here it is done without asking
only where no value needs to live any longer for it: at no moment of the program is more alive than before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, info, operands_of
from ..program import Storage, StorageTable, view_base
from .base import Phase, ProgramPass
from .recompute import forward_nodes, insert_recompute

__all__ = ["CheapValues", "RecomputeCheap"]

aten = torch.ops.aten

_CHEAP = {aten._to_copy.default, aten.native_layer_norm.default, aten.embedding.default}
if hasattr(aten, "_fused_rms_norm"):
    _CHEAP.add(aten._fused_rms_norm.default)

# An op costs some 10 µs to launch, in which a CPU moves as many bytes: below that its launch is most of what it costs,
# and it takes many such values to make a difference.
LEAST = 128 << 10


@dataclass(frozen=True)
class RecomputeCheap(ProgramPass):
    """Recompute cheap values in the backward from values that are saved for it anyway."""

    name: ClassVar[str] = "cheap ops again"
    phase: ClassVar[Phase] = Phase.SUMS  # where gathers stand, and what is kept of them, is settled

    def run(self, traced: Traced, mesh: Mesh) -> None:
        CheapValues(traced).drop()


class CheapValues:
    """The values to drop, found from the end of the forward to its begin: users before what they take.

    A value is dropped if its op is cheap, the backward alone takes it from some op on, and all that the op takes lives
    as long or longer: as what is itself dropped does too, by its copy. So each is computed again once at most.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced, self.ledger = traced, StorageTable("", traced)
        self.number = {node: index for index, node in enumerate(self.ledger.nodes)}
        self.outputs = {s for out in traced.outputs if isinstance(out, fx.Node) for s in self.ledger.storages[out]}
        self.values: dict[Storage, list[fx.Node]] = {}
        self.copies: dict[fx.Node, list[fx.Node]] = {}
        for node in self.ledger.nodes:
            for storage in self.ledger.storages[node]:
                self.values.setdefault(storage, []).append(node)
            if info(node).recomputed:
                self.copies.setdefault(info(node).forward_node, []).append(node)
        self.wanted: dict[Storage, int] = {}  # by the copies that are to be made, and where

    def drop(self) -> list[fx.Node]:
        """Rewrite the program; the copies that were made, in order."""
        dropped: set[fx.Node] = set()
        instead: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        for node in reversed(forward_nodes(self.traced)):
            taken = self._operands_of_copy(node) if _is_cheap(node) else None
            if taken is not None:
                own = self.ledger.made_by(node)
                dropped.update(each for s in own for each in self.values[s] if not info(each).backward)
                instead |= {(node, operand): copy for operand, copy in taken.items()}
        insert_recompute(self.traced, dropped, instead)
        copies = [node for node in self.traced.nodes if node not in self.number]
        for copy in copies:
            if copy.target is operator.getitem:  # taken out at once, results do not wait for one another
                copy.args[0].append(copy)  # type: ignore[union-attr]
        return copies

    def _operands_of_copy(self, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
        """What a copy of an op would take, each kept value or a copy of it; None if there shall be no copy."""
        own = self.ledger.made_by(node)
        if sum(self.ledger.sizes[storage] for storage in own) < LEAST or not self.may_drop(node):
            return None
        when = self._needed(own)
        if when is None:
            return None
        taken: dict[fx.Node, fx.Node] = {}
        for operand in operands_of(node):
            there = [operand, *self.copies.get(operand, [])]
            found = next((each for each in there if self.is_there(each, node, when)), None)
            if found is None:
                return None
            taken[operand] = found
        for found in taken.values():
            for storage in self.ledger.storages[found]:
                self.wanted[storage] = min(when, self.wanted.get(storage, when))
        return taken

    def _needed(self, own: list[Storage]) -> int | None:
        """Where a copy would stand, if each result is kept for the backward, and nothing else takes it later."""
        first: float = math.inf
        for storage in own:
            backward = [self.number[user] for user in self.users(storage) if info(user).backward]
            if not backward:
                return None
            first = min(first, *backward, self.wanted.get(storage, math.inf))
        others = (self.number[user] for storage in own for user in self.users(storage) if not info(user).backward)
        return int(first) if all(number < first for number in others) else None

    def users(self, storage: Storage) -> Iterator[fx.Node]:
        """The ops that take a value of a storage; the forward's views of it do not."""
        for value in self.values.get(storage, [storage[0]]):
            for user in value.users:
                if user in self.number and (view_base(user) is None or info(user).backward):
                    yield user

    def may_drop(self, node: fx.Node) -> bool:
        """Whether an op's results are nobody's but the program's."""
        return self.outputs.isdisjoint(self.ledger.made_by(node))

    def is_there(self, value: fx.Node, taker: fx.Node, when: int) -> bool:
        """Whether a value lies in memory at an op of the backward anyway, so that a copy of the taker can take it."""
        spans, always = self.ledger.spans, (-1, len(self.number))
        lives = (spans.get(storage, always) for storage in self.ledger.storages[value])
        return self.number.get(value, -1) < when and all(last >= when for _, last in lives)


def _is_cheap(node: fx.Node) -> bool:
    """Whether an op takes about the time that it takes to read its operands, and always makes the same of them."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or view_base(node) is not None:
        return False
    return node.target in _CHEAP or torch.Tag.pointwise in tags
