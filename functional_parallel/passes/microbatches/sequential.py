"""Bring a step with microbatches that follow each other in a pipeline into the form that is cut into stages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from sharding_specs import Mesh

from ...ir import Traced, first_operand, info, primitive_name
from ...ops import TO_MEMORY
from ..program_pass import Phase, ProgramPass, Settings
from .rounds import names_axis


@dataclass(frozen=True)
class SequentialMicrobatches(ProgramPass):
    """Remove casts over the microbatches of a pipeline, and sum the squares of each tensor where it is."""

    axis: str
    name: ClassVar[str] = "microbatches"
    phase: ClassVar[Phase] = Phase.CUT
    is_required: ClassVar[bool] = True

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [] if settings.pipelined is None else [cls(settings.pipelined)]

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for node in list(traced.nodes):
            if primitive_name(node) == "pcast" and names_axis(node, self.axis):
                traced.replace(node, first_operand(node))
        _sum_one_by_one(traced)


def _sum_one_by_one(traced: Traced) -> None:
    """Split sums of squares of tensors on several ranks into one sum per tensor, added in the same order."""
    squares, add = torch.ops.fp.sum_of_squares.default, torch.ops.aten.add.Tensor
    for node in list(traced.nodes):
        if node.target is not squares:
            continue
        total, last = None, next((user for user in node.users if user.target is TO_MEMORY), node)  # sent from there
        for tensor in node.args[0]:
            with traced.graph.inserting_before(last):
                one = traced.call(squares, ([tensor],), info(node))
                one = one if last is node else traced.add_copy(last, {node: one}.__getitem__, info(last))
                total = one if total is None else traced.call(add, (total, one), info(last))
        assert total is not None
        traced.replace(last, total)
