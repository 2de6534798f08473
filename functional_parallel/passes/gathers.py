"""Place the gathers of sharded parameters: just before use, again for the backward, some layers ahead.

ZeRO-3 (arXiv 1910.02054 §5.3) and FSDP (arXiv 2304.11277 §4) release a layer's parameters after the forward has used
them. Here this needs no managed state: the backward uses copies of the gathers, so no value lives from one to the
other.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..collectives import MICROBATCH, CollectiveCall
from ..ir import Role, Traced, collective_call, first_operand, forward_nodes, info, reached, walk_args
from .layer_index import is_numbered, layer_of_path
from .program_pass import Phase, ProgramPass
from .recompute import insert_recompute
from .swap import is_cast, is_view

aten = torch.ops.aten


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
        found = [node for node in traced.nodes if (call := _gather(node)) and self.axis in call.axes]
        GatherPlan(traced, found, self.prefetch).place()

    def _gathered(self, traced: Traced) -> set[fx.Node]:
        """Return the forward's gathers, the values that they are computed from, and views and casts of their results.

        Gathers over other axes belong to them if they read the result of one, unless those axes are in `kept`.
        """
        found: set[fx.Node] = set()
        for node in forward_nodes(traced):
            if call := _gather(node):
                follows = first_operand(node) in found and self.kept.isdisjoint(call.axes)
                if self.axis in call.axes or follows:
                    found.update([node, *_computed_before(node)])
            elif only_rearranges(node) and first_operand(node) in found:
                found.add(node)
        return found


class GatherPlan:
    """Places gathers of parameters, or moves to the device, layer by layer."""

    def __init__(self, traced: Traced, found: Sequence[fx.Node], prefetch: int) -> None:
        self.prefetch = prefetch
        self.ordered = list(traced.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.ordered)}  # before any op is moved
        self.moved = {gather: self._with_views(gather) for gather in found}  # and what moves along
        self.gathers = sorted((self.first_use(gather), gather) for gather in found)
        self.is_moved = {node for steps in self.moved.values() for step in steps for node in step}
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
            for step in (0, 1, 2):  # the gathers next to each other, so that they can be merged
                for gather, start in zip(gathers, starts, strict=True):
                    for node in self.moved[gather][step]:
                        self.ordered[start].prepend(node)

    def _starts(self, gathers: list[fx.Node], ahead: int, first_use: int) -> list[int]:
        earliest = max(self.released[gather] for gather in gathers)
        latest = min(first_use, *(self.next_gather(gather) for gather in gathers))
        together = min(max(ahead, earliest), latest)
        if together >= earliest:
            return [together] * len(gathers)
        return [self._start(gather, max(ahead, self.released[gather])) for gather in gathers]

    def _start(self, gather: fx.Node, wanted: int) -> int:
        return min(wanted, self._uses(gather)[0], self.next_gather(gather))

    def _released(self) -> dict[fx.Node, int]:
        last: defaultdict[Hashable, int] = defaultdict(int)  # the first op is a parameter
        found = {}
        for _, gather in self.gathers:
            recipe = _recipe(gather)
            found[gather] = self._after(last[recipe])
            last[recipe] = max(last[recipe], self._uses(gather)[-1])
        return found

    def _after(self, position: int) -> int:
        position += 1
        while self.ordered[position] in self.is_moved:
            position += 1
        return position

    def first_use(self, gather: fx.Node) -> int:
        """Return the position before which a gather must have ended."""
        return self._uses(gather)[0]

    def _uses(self, gather: fx.Node) -> list[int]:
        """Return the positions of the ops that compute with a gathered parameter; the graph's end if there are none."""
        passed = reached([gather], lambda node: filter(_moves, node.users))
        users = {user for node in passed for user in node.users if user not in passed}
        return sorted(map(self.position.__getitem__, users)) or [max(self.position.values())]

    def next_gather(self, gather: fx.Node) -> int:
        users = [user for node in (gather, *self.moved[gather][2]) for user in node.users]
        return min((self.position[user] for user in users if _gather(user)), default=len(self.ordered) - 1)

    def _with_views(self, gather: fx.Node) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """Return the values before a gather that only it reads, the gather, and views and casts of its result."""
        before = [gather]
        while (value := first_operand(before[0])).op == "call_function" and len(value.users) == 1:
            before.insert(0, value)
        _, *after = reached([gather], lambda node: filter(only_rearranges, node.users))
        return before[:-1], [gather], sorted(after, key=self.position.__getitem__)


def _recipe(gather: fx.Node) -> Hashable:
    """Key that is equal for two gathers with the same result: the parameter and the ops on it."""
    ops, node = [], gather
    while node.op == "call_function":
        others = walk_args((node.args, node.kwargs), lambda each: None if isinstance(each, fx.Node) else each)
        ops.append((node.target, repr(others)))
        node = first_operand(node)
    return node, *ops


def _gather(node: fx.Node) -> CollectiveCall | None:
    call = collective_call(node, "all_gather") if info(node).role is Role.PARAMETER else None
    return call if call is not None and MICROBATCH not in call.axes else None


def is_gather(node: fx.Node) -> bool:
    """Whether an op gathers a parameter."""
    return _gather(node) is not None


def _moves(node: fx.Node) -> bool:
    return only_rearranges(node) or is_gather(node)


def only_rearranges(node: fx.Node) -> bool:
    return is_view(node) or is_cast(node) or node.target is aten.expand.default


def _computed_before(gather: fx.Node) -> list[fx.Node]:
    """Return casts and views of a parameter before its gather. They are recomputed with it, so that they can move."""
    found: list[fx.Node] = []
    node = first_operand(gather)
    while node.op == "call_function" and not _gather(node):
        found.append(node)
        node = first_operand(node)
    return found


def layer_of_gather(gather: fx.Node) -> str:
    """Layer of the parameter that `gather` gathers. Parameters outside numbered layers belong to one layer named ""."""
    layer = layer_of_path(f"0/{info(gather).parameters[0]}")  # the parameters are the first argument
    return layer if is_numbered(layer) else ""
