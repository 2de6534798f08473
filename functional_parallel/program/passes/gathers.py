"""When parameters that lie sharded are gathered: just before use, again for the backward, some layers ahead.

ZeRO-3 (arXiv 1910.02054 §5.3) and FSDP (arXiv 2304.11277 §4) release a layer's parameters after the forward has used
them. Here that is no state to manage: the backward uses copies of the gathers, so no value lives from one to the other.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import fx

from sharding_specs import Mesh

from ...tracing import Traced
from ...tracing.graph import operands_of, primitive_name
from .base import ProgramPass
from .groups import is_numbered, layer_of_path
from .recompute import forward_nodes, recompute

__all__ = ["Gathers", "layer_of_gather"]

aten = torch.ops.aten

_RESHAPED = {
    aten.view.default,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.detach.default,
}


@dataclass(frozen=True)
class Gathers(ProgramPass):
    """Place the gathers of parameters over one axis.

    Attributes:
        axis: the mesh axis over which they lie sharded.
        keep: whether what the forward gathered is kept for the backward (FSDP's reshard_after_forward=False).
        prefetch: how many layers ahead of its first use a layer is gathered.
    """

    axis: str
    keep: bool = False
    prefetch: int = 1
    name: str = "gathers"
    order: int = 1

    def per_microbatch(self, traced: Traced) -> set[fx.Node]:
        return set() if self.keep else self._gathered(traced)

    def run(self, traced: Traced, mesh: Mesh) -> None:
        gathered = self._gathered(traced)
        if not self.keep:
            recompute(traced, gathered)
        self._place(traced)

    def _gathered(self, traced: Traced) -> set[fx.Node]:
        """The gathers in the forward, what they are made of, and views and casts of their results."""
        stored = set(traced.inputs)  # and what is made of parameters without communication
        found: set[fx.Node] = set()
        for node in forward_nodes(traced):
            needs = operands_of(node)
            if self._is_gather(node) and needs[0] in stored:
                found.update([node, *_made_of(node)])
            elif node.target in _RESHAPED or primitive_name(node) == "pcast":
                if needs[0] in found:
                    found.add(node)
                elif needs[0] in stored:
                    stored.add(node)
        return found

    def _is_gather(self, node: fx.Node) -> bool:
        return primitive_name(node) == "all_gather" and self.axis in node.args[1]

    def _place(self, traced: Traced) -> None:
        """Move each layer's gathers to the first use of the layer that is `prefetch` layers before it."""
        position = {node: index for index, node in enumerate(traced.graph.nodes)}
        uses = sorted((self._first_use(g, position), g) for g in traced.nodes if self._is_parameter_gather(g, position))
        ordered = list(position)
        groups = [
            [(ordered[use], gather) for use, gather in group]
            for _, group in itertools.groupby(uses, key=lambda pair: layer_of_gather(pair[1]))
        ]
        for index, group in enumerate(groups):
            ahead = groups[max(index - self.prefetch, 0)] if self.prefetch else group
            moved = [(use, *self._with_views(gather, position)) for use, gather in group]
            for use, made, _ in moved:
                for node in made:
                    (ahead[0][0] if self.prefetch else use).prepend(node)
            for use, _, views in moved:  # after all gathers of the layer, so that these can travel together
                for node in views:
                    (ahead[0][0] if self.prefetch else use).prepend(node)

    def _is_parameter_gather(self, node: fx.Node, position: dict[fx.Node, int]) -> bool:
        return self._is_gather(node) and stored_input(node) is not None

    def _first_use(self, gather: fx.Node, position: dict[fx.Node, int]) -> int:
        """The position of the first op that computes with a gathered parameter."""
        uses = [
            self._first_use(user, position) if user.target in _RESHAPED or _is_cast(user) else position[user]
            for user in gather.users
            if user.op == "call_function"
        ]
        return min(uses, default=len(position) - 1)

    def _with_views(self, gather: fx.Node, position: dict[fx.Node, int]) -> tuple[list[fx.Node], list[fx.Node]]:
        """A gather with what is made for it alone before it; views and casts of its result; both in order."""
        before = [gather]
        while before[0].args[0].op == "call_function" and len(before[0].args[0].users) == 1:
            before.insert(0, before[0].args[0])
        after, pending = [], [gather]
        while pending:
            views = [user for user in pending.pop().users if user.target in _RESHAPED or _is_cast(user)]
            after += views
            pending += views
        return before, sorted(after, key=position.__getitem__)


def _is_cast(node: fx.Node) -> bool:
    return primitive_name(node) == "pcast"


def _made_of(gather: fx.Node) -> list[fx.Node]:
    """The casts and views of a parameter that stand before its gather: made again with it, they may move with it."""
    found: list[fx.Node] = []
    node = gather.args[0]
    while node.op == "call_function":
        found.append(node)
        node = node.args[0]
    return found


def stored_input(gather: fx.Node) -> fx.Node | None:
    """The parameter that a gather gathers, through casts and views of it."""
    node = gather.args[0]
    while node.op == "call_function" and (node.target in _RESHAPED or _is_cast(node)):
        node = node.args[0]
    return node if node.op == "placeholder" and node.meta.get("parameter") else None


def layer_of_gather(gather: fx.Node) -> str:
    """The layer whose parameter a gather gathers; what is in no stack of layers counts as one layer, unnamed."""
    node = stored_input(gather)
    layer = "" if node is None else layer_of_path(node.meta["path"])
    return layer if is_numbered(layer) else ""
