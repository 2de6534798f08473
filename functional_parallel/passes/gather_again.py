"""Gather activations again for the backward, so that it saves the shards of a rank instead of the gathered values.

With sequence parallelism (arXiv 2205.05198 §4.2) the inputs of a layer's first products are gathered from shards of the
sequence. The gradient of a weight reads the gathered input. Megatron-LM saves the shard and gathers it again, which is
two gathers per layer more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, collective_call, forward_nodes, operands_of
from ..program import view_base
from .layer_index import made_of_parameters
from .program_pass import Phase, ProgramPass
from .recompute import insert_recompute


@dataclass(frozen=True)
class GatherAgain(ProgramPass):
    """Save shards of the activations that are gathered over an axis, and gather them again for the backward."""

    axis: str
    name: ClassVar[str] = "gather again"
    phase: ClassVar[Phase] = Phase.RECOMPUTE

    def run(self, traced: Traced, mesh: Mesh) -> None:
        forward = forward_nodes(traced)
        weights, gathered = made_of_parameters(forward), set[fx.Node]()
        for node in forward:
            call = collective_call(node, "all_gather")
            is_gather = call is not None and self.axis in call.axes and node not in weights
            if is_gather or (view_base(node) is not None and not gathered.isdisjoint(operands_of(node))):
                gathered.add(node)
        insert_recompute(traced, gathered)
