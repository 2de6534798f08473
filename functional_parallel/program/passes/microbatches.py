"""Whether ranks sum a gradient once per step, or after every microbatch.

A partitioned function sums over microbatches first and over ranks once. ZeRO-2 as published (arXiv 1910.02054 §5.2)
reduces after every microbatch: more is sent, and a rank never holds more of the sum than its part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from sharding_specs import Mesh

from ...tracing import Traced
from ..collectives import primitive_name

__all__ = ["ReduceEach"]

aten = torch.ops.aten

_LINEAR = {
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.constant_pad_nd.default,
    aten._to_copy.default,
}


@dataclass(frozen=True)
class ReduceEach:
    """Move sums over microbatches behind the sums over ranks; runs before microbatches are unrolled.

    Attributes:
        axis: the axis of microbatches.
    """

    axis: str
    name: str = "reduce each microbatch"
    order: int = -1

    def per_microbatch(self, traced: Traced) -> set[fx.Node]:
        return set()

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for node in list(traced.nodes):
            if primitive_name(node) == "psum" and list(node.args[1]) == [self.axis] and node.meta["backward"]:
                last = self._reduction_after(node)
                if last is not None:
                    self._move(traced, node, last)

    def _reduction_after(self, node: fx.Node) -> fx.Node | None:
        """The sum over ranks that alone uses a value, through ops that are linear in it."""
        while len(node.users) == 1:
            node = next(iter(node.users))
            if primitive_name(node) in ("psum", "psum_scatter"):
                return node
            if node.target not in _LINEAR and primitive_name(node) != "pcast":
                return None
        return None

    def _move(self, traced: Traced, total: fx.Node, reduction: fx.Node) -> None:
        total.replace_all_uses_with(total.args[0])
        reduction.append(total)
        reduction.replace_all_uses_with(total)
        traced.outputs = [total if output is reduction else output for output in traced.outputs]
        total.args = (reduction, *total.args[1:])
        total.meta["val"] = reduction.meta["val"]
