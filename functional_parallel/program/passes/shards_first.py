"""A gradient that several data axes sum is scattered before it is summed whole: ranks send shards of it, not all of it.

Where parameters are sharded over one axis and replicated over another (HSDP, arXiv 2304.11277 §3.2), the transposes of
the two transforms come in the order of the chain: the sum over replicas of the whole gradient, then the reduce-scatter.
Both are sums, so they can change places, and what replicas then sum is one rank's part. Sums over two axes that scatter
nothing go from the mesh's innermost axis outwards, so that every ZeRO stage adds up in the same order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from sharding_specs import Mesh

from ...tracing import Traced
from ..collectives import primitive_name
from .linear import is_linear

__all__ = ["ShardsFirst"]

aten = torch.ops.aten


@dataclass(frozen=True)
class ShardsFirst:
    """Move sums over some axes behind the reduce-scatters over others.

    Attributes:
        axes: the axes that split the batch.
    """

    axes: tuple[str, ...]
    name: str = "shards first"
    order: int = -2

    def per_microbatch(self, traced: Traced) -> set[fx.Node]:
        return set()

    def run(self, traced: Traced, mesh: Mesh) -> None:
        moved = True
        while moved:  # with three axes a sum has two reductions to pass
            moved = any([self._let_pass(traced, mesh, node) for node in list(traced.nodes)])

    def _let_pass(self, traced: Traced, mesh: Mesh, reduction: fx.Node) -> bool:
        name = primitive_name(reduction)
        if name not in ("psum", "psum_scatter") or not self._is_ours(reduction):
            return False
        sums, path = self._sums_before(reduction)
        if not sums or (name == "psum" and not _is_inside(reduction, sums[0], mesh)):
            return False
        _swap(traced, sums, path, reduction)
        return True

    def _is_ours(self, node: fx.Node) -> bool:
        return set(node.args[1]) <= set(self.axes)

    def _sums_before(self, reduction: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
        """The sums of gradients of which a reduction is made by linear ops alone, and these ops; none if of others."""
        sums: list[fx.Node] = []
        path: list[fx.Node] = []
        pending = [reduction.args[0]]
        for node in pending:
            if node.op != "call_function" or len(node.users) > 1:
                return [], []
            if primitive_name(node) == "psum" and self._is_ours(node) and node.meta["backward"]:
                sums.append(node)
                continue
            path.append(node)
            if node.target is aten.cat.default:  # gradients end to end
                pending += node.args[0]
            elif is_linear(node) or _widens(node):
                pending.append(node.args[0])
            else:
                return [], []
        alike = len({(tuple(node.args[1]), *node.args[2:], node.args[0].meta["type"]) for node in sums}) == 1
        casts = {axis for node in path if primitive_name(node) == "pcast" for axis in node.args[1]}
        return (sums, path) if alike and not casts.intersection(sums[0].args[1]) else ([], [])


def _widens(node: fx.Node) -> bool:
    """Whether an op casts to a type in which a sum is the more exact."""
    return (
        node.target is aten._to_copy.default
        and node.meta["val"].dtype.is_floating_point
        and node.meta["val"].dtype.itemsize > node.args[0].meta["val"].dtype.itemsize
    )


def _is_inside(node: fx.Node, other: fx.Node, mesh: Mesh) -> bool:
    """Whether the axes of one reduction lie inside those of another."""
    return min(map(mesh.axis_names.index, node.args[1])) > max(map(mesh.axis_names.index, other.args[1]))


def _swap(traced: Traced, sums: list[fx.Node], path: Collection[fx.Node], reduction: fx.Node) -> None:
    axes, last = tuple(sums[0].args[1]), sums[0]
    state = last.args[0].meta["type"][axes[0]]
    for node in sums:
        node.replace_all_uses_with(node.args[0])
    for node in sums[1:]:
        traced.graph.erase_node(node)
    reduction.append(last)
    reduction.replace_all_uses_with(last)
    traced.outputs = [last if output is reduction else output for output in traced.outputs]
    last.args = (reduction, *last.args[1:])
    last.meta.update(val=reduction.meta["val"], type=reduction.meta["type"])
    for node in (*path, reduction):
        node.meta["type"] = node.meta["type"].having(axes, state)
        node.meta["backward"] = True
