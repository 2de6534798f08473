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

from ..ir import Traced, collective_call, info, the_call, update_info
from .program_pass import Phase, ProgramPass
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
        call = collective_call(reduction, "psum", "psum_scatter")
        if call is None or not set(call.axes) <= set(self.axes):
            return False
        inner = min(map(mesh.axis_names.index, call.axes))

        def is_passed(node: fx.Node) -> bool:
            axes = the_call(node).axes
            if not (set(axes) <= set(self.axes) and info(node).backward):
                return False
            return call.kind == "psum_scatter" or inner > max(map(mesh.axis_names.index, axes))

        ahead = move_before_sums(traced, reduction, is_passed)
        for node in ahead:  # the reduce-scatter of an optimizer joins the backward
            update_info(node, backward=True)
        return bool(ahead)
