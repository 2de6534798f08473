"""A gradient that several data axes sum is scattered before it is summed whole: ranks send shards of it, not all of it.

Where parameters are sharded over one axis and replicated over another (HSDP, arXiv 2304.11277 §3.2), the transposes of
the two transforms come in the order of the chain: the sum over replicas of the whole gradient, then the reduce-scatter.
Both are sums, so they can change places, and what replicas then sum is one rank's part. Sums over two axes that scatter
nothing go from the mesh's innermost axis outwards, so that every ZeRO stage adds up in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, info, primitive_name, update_info
from .base import Phase, ProgramPass
from .swap import move_before_sums

__all__ = ["ReduceScatterFirst"]


@dataclass(frozen=True)
class ReduceScatterFirst(ProgramPass):
    """Move sums over some axes after the reduce-scatters over others.

    Attributes:
        axes: the axes that split the batch.
    """

    axes: tuple[str, ...]
    name: ClassVar[str] = "shards first"
    phase: ClassVar[Phase] = Phase.PREPARE

    def run(self, traced: Traced, mesh: Mesh) -> None:
        moved = True
        while moved:  # with three axes a sum has two reductions to pass
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
        for node in ahead:  # an optimizer's reduce-scatter becomes part of the backward
            update_info(node, backward=True)
        return bool(ahead)

    def _is_ours(self, node: fx.Node) -> bool:
        return set(node.args[1]) <= set(self.axes)


def _is_inside(node: fx.Node, other: fx.Node, mesh: Mesh) -> bool:
    """Whether the axes of one reduction lie inside those of another."""
    return min(map(mesh.axis_names.index, node.args[1])) > max(map(mesh.axis_names.index, other.args[1]))
