"""Place the gathers of sharded parameters: just before use, again for the backward, some layers ahead.

ZeRO-3 (arXiv 1910.02054 §5.3) and FSDP (arXiv 2304.11277 §4) release a layer's parameters after the forward has used
them. Here this needs no managed state: the backward uses copies of the gathers, so no value lives from one to the
other.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..collectives import MICROBATCH
from ..ir import Traced, forward_nodes, info, operands_of, primitive_name
from .base import Phase, ProgramPass
from .layer_index import is_numbered, layer_of_path
from .recompute import insert_recompute
from .swap import REARRANGED

aten = torch.ops.aten

_RESHAPED = REARRANGED | {aten.expand.default, aten._to_copy.default, aten.detach.default}


@dataclass(frozen=True)
class GatherPlacement(ProgramPass):
    """Place the gathers of parameters over one axis.

    A parameter may be sharded over several axes. Then its gather over one axis reads the result of its gather over
    another. Re-gathering one of them re-gathers those after it, so that no gathered copy is saved for the backward.
    """

    axis: str
    keep: bool = False  # whether the backward uses the forward's copies (FSDP's reshard_after_forward=False)
    prefetch: int = 1  # number of layers between a gather and its first use
    kept: frozenset[str] = frozenset()  # axes with gathers that transforms inside this one keep
    name: ClassVar[str] = "gathers"
    phase: ClassVar[Phase] = Phase.GATHERS

    def per_microbatch(self, traced: Traced) -> set[fx.Node]:
        return set() if self.keep else self._gathered(traced)

    def run(self, traced: Traced, mesh: Mesh) -> None:
        gathered = self._gathered(traced)
        if not self.keep:
            insert_recompute(traced, gathered)
        Placement(traced, self.axis, self.prefetch).place()

    def _gathered(self, traced: Traced) -> set[fx.Node]:
        """Return the forward's gathers, the values that they are computed from, and views and casts of their results.

        Gathers over other axes belong to them if they read the result of one, unless those axes are in `kept`.
        """
        stored = set(traced.inputs)  # and values computed from one parameter alone
        found: set[fx.Node] = set()
        for node in forward_nodes(traced):
            operand = next(iter(operands_of(node)), None)
            if _is_gather(node):
                own = self.axis in node.args[1] and operand in stored
                if own or (operand in found and self.kept.isdisjoint(node.args[1])):
                    found.update([node, *_computed_before(node)])
                elif operand in stored:
                    stored.add(node)
            elif _is_view(node):
                if operand in found:
                    found.add(node)
                elif operand in stored:
                    stored.add(node)
        return found


class Placement:
    """Moves the gathers of parameters over one axis, layer by layer."""

    def __init__(self, traced: Traced, axis: str, prefetch: int) -> None:
        self.prefetch = prefetch
        self.ordered = list(traced.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.ordered)}  # before any op is moved
        found = [n for n in traced.nodes if _is_gather(n) and axis in n.args[1] and stored_input(n) is not None]
        self.gathers = sorted((self._uses(gather)[0], gather) for gather in found)  # by position of the first use
        self.moved = {gather: self._with_views(gather) for gather in found}  # and what moves along
        self.is_moved = {node for before, after in self.moved.values() for node in (*before, *after)}
        self.released = self._released()

    def place(self) -> None:
        """Move each layer's gathers to the first use of the layer that is `prefetch` layers before it.

        A gather does not start before the last use of an earlier copy of the same parameter.
        """
        by_layer = itertools.groupby(self.gathers, lambda pair: (layer_of_gather(pair[1]), info(pair[1]).backward))
        groups = [list(group) for _, group in by_layer]  # the gathers of one layer, in one direction
        for index, group in enumerate(groups):
            gathers = [gather for _, gather in group]
            if self.prefetch:
                ahead = groups[max(index - self.prefetch, 0)][0][0]
                starts = self._starts(gathers, ahead, group[0][0])
            else:
                starts = [self._start(gather, use) for use, gather in group]
            for step in (0, 1):  # all gathers before all views, so that the gathers can be merged
                for gather, start in zip(gathers, starts, strict=True):
                    for node in self.moved[gather][step]:
                        self.ordered[start].prepend(node)

    def _starts(self, gathers: list[fx.Node], ahead: int, first_use: int) -> list[int]:
        """Positions for the gathers of a layer: one for all of them where possible."""
        earliest = max(self.released[gather] for gather in gathers)
        latest = min(first_use, *(self._next_gather(gather) for gather in gathers))
        together = min(max(ahead, earliest), latest)
        if together >= earliest:
            return [together] * len(gathers)
        return [self._start(gather, max(ahead, self.released[gather])) for gather in gathers]

    def _start(self, gather: fx.Node, wanted: int) -> int:
        """Return the wanted position, or that of the first op that reads the gather's result, if it is earlier."""
        return min(wanted, self._uses(gather)[0], self._next_gather(gather))

    def _released(self) -> dict[fx.Node, int]:
        """Return the earliest start of each gather: after the last use of the previous copy of the same parameter."""
        last: defaultdict[Hashable, int] = defaultdict(int)  # the first op is a parameter
        found = {}
        for _, gather in self.gathers:
            recipe = _recipe(gather)
            found[gather] = self._after(last[recipe])
            last[recipe] = max(last[recipe], self._uses(gather)[-1])
        return found

    def _after(self, position: int) -> int:
        """Return the first position after `position` with an op that is not moved."""
        position += 1
        while self.ordered[position] in self.is_moved:
            position += 1
        return position

    def _uses(self, gather: fx.Node) -> list[int]:
        """Return the positions of the ops that compute with a gathered parameter; the graph's end if there are none."""
        found, pending = [], [gather]
        while pending:
            for user in pending.pop().users:
                if _is_view(user) or _is_gather(user):
                    pending.append(user)
                else:
                    found.append(self.position[user])
        return sorted(found) or [max(self.position.values())]

    def _next_gather(self, gather: fx.Node) -> int:
        """Return the position of the first gather over another axis that reads a gather's result."""
        users = [user for node in (gather, *self.moved[gather][1]) for user in node.users]
        return min((self.position[user] for user in users if _is_gather(user)), default=len(self.ordered) - 1)

    def _with_views(self, gather: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return a gather with the values before it that only it reads, and views and casts of its result, in order."""
        before = [gather]
        while before[0].args[0].op == "call_function" and len(before[0].args[0].users) == 1:
            before.insert(0, before[0].args[0])
        after = [gather]
        for node in after:
            after += [user for user in node.users if _is_view(user)]
        return before, sorted(after[1:], key=self.position.__getitem__)


def _recipe(gather: fx.Node) -> Hashable:
    """Key that is equal for two gathers with the same result: the parameter and the ops on it."""
    ops, node = [], gather
    while node.op == "call_function":
        ops.append((node.target, repr(node.args[1:]), repr(node.kwargs)))
        node = node.args[0]
    return node, *ops


def _is_gather(node: fx.Node) -> bool:
    """Return whether a node gathers over axes of the mesh. Microbatches are gathered once, from all of them."""
    return primitive_name(node) == "all_gather" and MICROBATCH not in node.args[1]


def _is_view(node: fx.Node) -> bool:
    return node.target in _RESHAPED or primitive_name(node) == "pcast"


def _computed_before(gather: fx.Node) -> list[fx.Node]:
    """Return casts and views of a parameter before its gather. They are recomputed with it, so that they can move."""
    found: list[fx.Node] = []
    node = gather.args[0]
    while node.op == "call_function" and not _is_gather(node):
        found.append(node)
        node = node.args[0]
    return found


def stored_input(gather: fx.Node) -> fx.Node | None:
    """Return the parameter that a gather reads, through casts, views and gathers over other axes."""
    node = gather.args[0]
    while node.op == "call_function" and (_is_view(node) or _is_gather(node)):
        node = node.args[0]
    return node if node.op == "placeholder" and info(node).is_parameter else None


def layer_of_gather(gather: fx.Node) -> str:
    """Layer of the parameter that `gather` gathers. Parameters outside numbered layers belong to one layer named ""."""
    node = stored_input(gather)
    layer = "" if node is None else layer_of_path(info(node).path)
    return layer if is_numbered(layer) else ""
