"""Scatter a gradient before it is summed over other data axes, so that ranks send shards of it, not all of it.

With parameters sharded over one axis and replicated over another (HSDP, arXiv 2304.11277 §3.2), the transposes of
the two transforms follow the order of the chain. The full gradient is summed over replicas, then reduce-scattered.
Both are sums, so they can be exchanged, and replicas then sum one rank's shard. Sums over two axes without a scatter
run from the innermost axis of the mesh outwards, so that every ZeRO stage adds in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, info, primitive_name, update_info
from .base import Phase, ProgramPass
from .swap import move_before_sums


@dataclass(frozen=True)
class ReduceScatterFirst(ProgramPass):
    """Move sums over some axes after the reduce-scatters over others."""

    axes: tuple[str, ...]  # that shard the batch
    name: ClassVar[str] = "shards first"
    phase: ClassVar[Phase] = Phase.PREPARE

    def run(self, traced: Traced, mesh: Mesh) -> None:
        moved = True
        while moved:  # with three axes a sum has two reductions to move past
            moved = any([self._let_pass(traced, mesh, node) for node in list(traced.nodes)])

    def _let_pass(self, traced: Traced, mesh: Mesh, reduction: fx.Node) -> bool:
        name = primitive_name(reduction)
        if name not in ("psum", "psum_scatter") or not self._is_ours(reduction):
            return False

        def is_passed(node: fx.Node) -> bool:
            if not (self._is_ours(node) and info(node).backward):
                return False
            return name == "psum_scatter" or _is_inside(reduction, node, mesh)

        ahead = move_before_sums(traced, reduction, is_passed)
        for node in ahead:  # the reduce-scatter of an optimizer joins the backward
            update_info(node, backward=True)
        return bool(ahead)

    def _is_ours(self, node: fx.Node) -> bool:
        return set(node.args[1]).issubset(self.axes)


def _is_inside(node: fx.Node, other: fx.Node, mesh: Mesh) -> bool:
    """Whether the axes of one reduction are inner to those of another."""
    return min(map(mesh.axis_names.index, node.args[1])) > max(map(mesh.axis_names.index, other.args[1]))
