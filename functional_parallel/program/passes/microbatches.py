"""Whether ranks sum once per step, or after every microbatch.

The gradient of a partitioned function is summed over microbatches first and over ranks once. Its value, and the count
that a mean divides by, come the other way round, as the transforms stand in the chain; there the sums change places.
ZeRO-2 as published (arXiv 1910.02054 §5.2) reduces gradients after every microbatch: more is sent, and a rank never
holds more of the sum than its part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from sharding_specs import Mesh

from ...tracing import Traced
from ..collectives import primitive_name
from .base import ProgramPass
from .linear import is_linear
from .swap import let_pass

__all__ = ["ReduceEach", "SumsOnce"]

aten = torch.ops.aten


@dataclass(frozen=True)
class SumsOnce(ProgramPass):
    """Move sums over ranks behind the sums over microbatches that are made of them; runs before the others are moved.

    Attributes:
        axis: the axis of microbatches.
    """

    axis: str
    name: str = "sums once"
    order: int = -2

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for node in list(traced.nodes):
            if is_total(node, self.axis):
                while let_pass(traced, node, lambda other: self.axis not in other.args[1]):
                    pass


def is_total(node: fx.Node, axis: str) -> bool:
    """Whether an op is a sum over microbatches."""
    return primitive_name(node) == "psum" and list(node.args[1]) == [axis]


@dataclass(frozen=True)
class ReduceEach(ProgramPass):
    """Move sums over microbatches behind the sums over ranks; runs before microbatches are unrolled.

    Attributes:
        axis: the axis of microbatches.
    """

    axis: str
    name: str = "reduce each microbatch"
    order: int = -1

    def run(self, traced: Traced, mesh: Mesh) -> None:
        moved: set[fx.Node] = set()
        for node in list(traced.nodes):
            if primitive_name(node) in ("psum", "psum_scatter") and not is_total(node, self.axis):
                totals = self._totals_before(node)
                if totals and not moved.intersection(totals):
                    self._move(traced, totals, node)
                    moved.add(totals[0])

    def _totals_before(self, reduction: fx.Node) -> list[fx.Node]:
        """The sums over microbatches of which a sum over ranks is made by linear ops alone; none if of others too."""
        found, pending = [], [reduction.args[0]]
        for node in pending:
            if len(node.users) > 1:
                return []
            if is_total(node, self.axis) and node.meta["backward"]:
                found.append(node)
            elif node.target is aten.cat.default:  # gradients end to end
                pending += node.args[0]
            elif is_linear(node) or node.target is aten._to_copy.default:
                pending.append(node.args[0])
            else:
                return []
        return found

    def _move(self, traced: Traced, totals: list[fx.Node], reduction: fx.Node) -> None:
        for each in totals:
            each.replace_all_uses_with(each.args[0])
        total = totals[0]
        for each in totals[1:]:
            traced.graph.erase_node(each)
        reduction.append(total)
        reduction.replace_all_uses_with(total)
        traced.outputs = [total if output is reduction else output for output in traced.outputs]
        total.args = (reduction, *total.args[1:])
        total.meta["val"] = reduction.meta["val"]
