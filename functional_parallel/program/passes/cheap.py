"""Cheap forward values are computed again for the backward where that surely frees memory.

An activation's result is kept for the gradient of the weight behind it, and the activation's operand for the gradient
of the activation itself, though the one follows from the other in no time; a norm's result follows from its operand,
kept too. Computing such values again is what arXiv 1604.06174 §3 proposes for cheap ops. Here it is done without asking
only where no value needs to live any longer for it: at no moment of the program is more alive than before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from sharding_specs import Mesh

from ...tracing import Traced
from ...tracing.graph import operands_of
from ..memory import Ledger, Storage, viewed
from .recompute import forward_nodes, recompute

__all__ = ["CheapAgain"]

aten = torch.ops.aten

_CHEAP = {aten._to_copy.default, aten.native_layer_norm.default, aten.embedding.default}
if hasattr(aten, "_fused_rms_norm"):
    _CHEAP.add(aten._fused_rms_norm.default)

# An op costs about 10 µs to launch, and an elementwise one moves some 10 bytes per nanosecond on a CPU: below this its
# launch is most of its cost, and so many values would have to be dropped to be noticed that a step would be.
LEAST = 128 << 10


@dataclass(frozen=True)
class CheapAgain:
    """Let the backward compute cheap values again from what is kept for it anyway."""

    name: str = "cheap ops again"
    order: int = 2  # where gathers stand, and what is kept of them, is settled

    def per_microbatch(self, traced: Traced) -> set[fx.Node]:
        return set()

    def run(self, traced: Traced, mesh: Mesh) -> None:
        found = _Search(traced)
        before = {node for node in traced.nodes if node.meta.get("recomputed")}
        recompute(traced, found.dropped, found.instead)
        for node in traced.nodes:
            if node.meta.get("recomputed") and node not in before:
                node.meta["cheap"] = True


class _Search:
    """What can be dropped, found from the end of the forward to its begin: users before what they take.

    Attributes:
        dropped: the values, with their views.
        instead: per dropped value and operand of it the copy of that which the backward has, where its copy takes that.
    """

    def __init__(self, traced: Traced) -> None:
        self.ledger = Ledger("", traced)
        self.number = {node: index for index, node in enumerate(self.ledger.nodes)}
        self.outputs = {s for out in traced.outputs if isinstance(out, fx.Node) for s in self.ledger.storages[out]}
        self.values: dict[Storage, list[fx.Node]] = {}
        self.copies: dict[fx.Node, list[fx.Node]] = {}
        for node in self.ledger.nodes:
            for storage in self.ledger.storages[node]:
                self.values.setdefault(storage, []).append(node)
            if node.meta.get("recomputed"):
                self.copies.setdefault(node.meta["forward"], []).append(node)
        self.dropped: set[fx.Node] = set()
        self.instead: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self.wanted: dict[Storage, int] = {}  # where copies need it
        for node in reversed(forward_nodes(traced)):
            self._consider(node)

    def _consider(self, node: fx.Node) -> None:
        own = self.ledger.made_by(node)
        if not own or not _is_cheap(node) or sum(self.ledger.sizes[storage] for storage in own) < LEAST:
            return
        when = self._needed(own)
        if when is None:
            return
        copies = self._operands_at(node, when)
        if copies is None:
            return
        for storage in own:
            self.dropped.update(each for each in self.values[storage] if not each.meta["backward"])
        self.instead |= {(node, operand): copy for operand, copy in copies.items()}
        for operand in operands_of(node):
            for storage in self.ledger.storages[operand]:
                self.wanted[storage] = min(when, self.wanted.get(storage, when))

    def _needed(self, own: list[Storage]) -> int | None:
        """Where a copy would stand, if the values wait for the backward there and nothing else takes them later."""
        first: float = math.inf
        for storage in own:
            uses = list(self._uses(storage))
            backward = [number for number, in_backward in uses if in_backward]
            if not backward or storage in self.outputs:
                return None
            first = min(first, *backward, self.wanted.get(storage, math.inf))
        others = (number for storage in own for number, in_backward in self._uses(storage) if not in_backward)
        return int(first) if all(number < first for number in others) else None

    def _uses(self, storage: Storage) -> Iterator[tuple[int, bool]]:
        """The ops that take a value of a storage, views of it left out, and whether they belong to the backward."""
        for value in self.values[storage]:
            for user in value.users:
                if user in self.number and (viewed(user) is None or user.meta["backward"]):
                    yield self.number[user], user.meta["backward"]

    def _operands_at(self, node: fx.Node, when: int) -> dict[fx.Node, fx.Node] | None:
        """For which operands a copy is there at an op of the backward; None if something is not there at all."""
        copies: dict[fx.Node, fx.Node] = {}
        for value in operands_of(node):
            if self._lives_at(value, when):
                continue
            there = [c for c in self.copies.get(value, []) if self.number[c] < when and self._lives_at(c, when)]
            if not there:
                return None
            copies[value] = there[0]
        return copies

    def _lives_at(self, value: fx.Node, when: int) -> bool:
        spans = self.ledger.spans
        return all(storage not in spans or spans[storage][1] >= when for storage in self.ledger.storages[value])


def _is_cheap(node: fx.Node) -> bool:
    """Whether an op takes about the time that it takes to read its operands, and always makes the same of them."""
    tags = getattr(node.target, "tags", ())
    if torch.Tag.nondeterministic_seeded in tags or viewed(node) is not None:
        return False
    return node.target in _CHEAP or torch.Tag.pointwise in tags
