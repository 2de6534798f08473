"""Recompute cheap forward values for the backward if that certainly frees memory.

The result of an activation is saved for the gradient of the following weight. The operand of the activation is saved
for its own gradient, although the result is quick to recompute from it. The result of a norm also follows from its
saved operand. Recomputation of cheap ops was proposed in arXiv 1604.06174 §3. This pass runs without a request, so it
acts only if no value lives longer because of it. At no op of the program are more bytes alive than before.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from ..ir import Traced, forward_nodes, in_main_memory, info, operands_of, update_info
from ..program import Storage, StorageTable, view_base
from .program_pass import Phase, ProgramPass, Scope, StagedOps, Unit
from .recompute import insert_recompute

aten = torch.ops.aten

_CHEAP = {aten._to_copy.default, aten.native_layer_norm.default, aten.embedding.default}
if hasattr(aten, "_fused_rms_norm"):
    _CHEAP.add(aten._fused_rms_norm.default)

# The launch of an op costs some 10 µs, the time in which a CPU or a GPU moves this number of bytes. Below that, the
# launch dominates the cost of the op, and only many such values together would make a difference.
LEAST, LEAST_ON_DEVICES = 128 << 10, 16 << 20


@dataclass(frozen=True)
class RecomputeCheap(ProgramPass):
    """Recompute cheap values in the backward from values that are saved for it anyway."""

    name: ClassVar[str] = "cheap ops again"
    phase: ClassVar[Phase] = Phase.SUMS  # the positions of gathers and the saved gathered values are settled
    scope: ClassVar[Scope] = Scope.STAGED
    is_implied: ClassVar[bool] = True

    def rewrite(self, unit: Unit) -> None:
        traced = unit.program.traced
        values = CheapValues(traced) if unit.staged is None else _CheapInStages(traced, unit.staged)
        for copy in values.drop():
            update_info(copy, is_cheap_copy=True)


class CheapValues:
    """Values to recompute, found from the end of the forward to its start: users before their operands.

    A value is dropped if its op is cheap and only the backward reads it from some op on. All operands of the op must
    live at least until then. An operand that is dropped too meets this condition through its copy. Each value is
    therefore recomputed at most once.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced, self.storages = traced, StorageTable("", traced)
        self.number = {node: index for index, node in enumerate(self.storages.nodes)}
        self.outputs = {s for out in traced.outputs if isinstance(out, fx.Node) for s in self.storages.storages[out]}
        self.values: dict[Storage, list[fx.Node]] = {}
        self.copies: dict[fx.Node, list[fx.Node]] = {}
        for node in self.storages.nodes:
            for storage in self.storages.storages[node]:
                self.values.setdefault(storage, []).append(node)
            if info(node).recomputed:
                self.copies.setdefault(info(node).forward_node, []).append(node)
        self.wanted: dict[Storage, int] = {}  # first op where a planned copy reads the storage

    def drop(self) -> list[fx.Node]:
        """Rewrite the program. Return the copies that were made, in order."""
        dropped: set[fx.Node] = set()
        instead: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        for node in reversed(forward_nodes(self.traced)):
            taken = self._operands_of_copy(node) if is_cheap(node) else None
            if taken is not None:
                own = self.storages.made_by(node)
                dropped.update(each for s in own for each in self.values[s] if not info(each).backward)
                instead |= {(node, operand): copy for operand, copy in taken.items()}
        insert_recompute(self.traced, dropped, instead)
        copies = [node for node in self.traced.nodes if node not in self.number]
        for copy in copies:
            if copy.target is operator.getitem:  # unpacked immediately, so that results do not wait for each other
                copy.args[0].append(copy)
        return copies

    def _operands_of_copy(self, node: fx.Node) -> dict[fx.Node, fx.Node] | None:
        """Map operands to the value that a copy of `node` would read: it or its copy. None if `node` must stay."""
        own = self.storages.made_by(node)
        least = LEAST if in_main_memory(info(node).result(0)) else LEAST_ON_DEVICES
        if sum(self.storages.sizes[storage] for storage in own) < least or not self.may_drop(node):
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
            for storage in self.storages.storages[found]:
                self.wanted[storage] = min(when, self.wanted.get(storage, when))
        return taken

    def _needed(self, own: list[Storage]) -> int | None:
        first: float = math.inf
        for storage in own:
            backward = [self.number[user] for user in self.users(storage) if info(user).backward]
            if not backward:
                return None
            first = min(first, *backward, self.wanted.get(storage, math.inf))
        others = (self.number[user] for storage in own for user in self.users(storage) if not info(user).backward)
        return int(first) if all(number < first for number in others) else None

    def users(self, storage: Storage) -> Iterator[fx.Node]:
        for value in self.values.get(storage, [storage[0]]):
            for user in value.users:
                if user in self.number and (view_base(user) is None or info(user).backward):
                    yield user

    def may_drop(self, node: fx.Node) -> bool:
        return self.outputs.isdisjoint(self.storages.made_by(node))

    def is_there(self, value: fx.Node, taker: fx.Node, when: int) -> bool:
        """Whether a value is still in memory at op `when` of the backward, so that a copy of `taker` can read it."""
        spans, always = self.storages.spans, (-1, len(self.number))
        lives = (spans.get(storage, always) for storage in self.storages.storages[value])
        return self.number.get(value, -1) < when and all(last >= when for _, last in lives)


class _CheapInStages(CheapValues):
    """Cheap values that only the backward of their own stage reads, with operands that this backward reads anyway."""

    def __init__(self, traced: Traced, staged: StagedOps) -> None:
        super().__init__(traced)
        self.staged, self.stage = staged, staged.of
        self.taken = {
            (self.stage[node], storage)
            for node in self.number
            if node in self.stage and node in staged.backward
            for operand in operands_of(node)
            for storage in self.storages.storages[operand]
        }

    def may_drop(self, node: fx.Node) -> bool:
        users = (user for s in self.storages.made_by(node) for user in self.users(s) if info(user).backward)
        return (
            super().may_drop(node)
            and node in self.stage
            and all(self.stage.get(user) == self.stage[node] for user in users)
        )

    def is_there(self, value: fx.Node, taker: fx.Node, when: int) -> bool:
        own, staged = self.stage[taker], self.staged
        if value in staged.backward and (self.number[value] >= when or self.stage.get(value, own) != own):
            return False
        storages = self.storages.storages[value]
        return all(staged.is_held(s[0]) or ((own, s) in self.taken and not staged.is_repeated(s[0])) for s in storages)


def is_cheap(node: fx.Node) -> bool:
    """Whether an op is deterministic and takes about the time needed to read its operands."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or view_base(node) is not None:
        return False
    return node.target in _CHEAP or torch.Tag.pointwise in tags
