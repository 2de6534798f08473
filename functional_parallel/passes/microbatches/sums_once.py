"""Sum over ranks once per step, or after every microbatch.

The gradient of a partitioned function is summed over microbatches first and then over ranks once. For its value, and
the count that a mean divides by, the order of transforms in the chain gives the reverse; there the sums are exchanged.
ZeRO stage 2 as published (arXiv 1910.02054 §5.2) reduces gradients after every microbatch. It sends more, and a rank
never holds more of the sum than its shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sharding_specs import Mesh

from ...ir import Traced, collective_call, info, primitive_name, the_call
from ..program_pass import Phase, ProgramPass, Settings
from ..swap import is_cast, move_before_sums


@dataclass(frozen=True)
class ReduceOncePerStep(ProgramPass):
    """Sum over ranks once per step: after the sum over microbatches."""

    axis: str  # of microbatches
    name: ClassVar[str] = "sums once"
    phase: ClassVar[Phase] = Phase.PREPARE

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [cls(axis) for axis, split in settings.splits.items() if split.ranks > 1]

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for node in list(traced.nodes):
            if is_total(node, self.axis):
                while move_before_sums(traced, node, lambda other: self.axis not in the_call(other).axes):
                    pass


def is_total(node: fx.Node, axis: str) -> bool:
    call = collective_call(node, "psum")
    return call is not None and call.axes == (axis,)


@dataclass(frozen=True)
class ReducePerMicrobatch(ProgramPass):
    """Sum over ranks for every microbatch: before the sum over microbatches."""

    axis: str  # of microbatches
    name: ClassVar[str] = "reduce each microbatch"
    phase: ClassVar[Phase] = Phase.TYPES

    def run(self, traced: Traced, mesh: Mesh) -> None:
        moved: set[fx.Node] = set()  # totals that an earlier sum over ranks has moved

        def is_passed(node: fx.Node) -> bool:
            return is_total(node, self.axis) and info(node).backward and node not in moved

        for node in list(traced.nodes):
            reduces = primitive_name(node) in ("psum", "psum_scatter") and not is_total(node, self.axis)
            if reduces and move_before_sums(traced, node, is_passed, through=is_cast):
                moved.update(node.users)
