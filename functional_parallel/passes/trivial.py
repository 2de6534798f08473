"""Remove collectives over axes of one rank from a program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sharding_specs import Mesh

from ..ir import Traced, collective_call, info
from .program_pass import Phase, ProgramPass, Unit

_REDUCTIONS = ("psum", "pmax", "pmin")


@dataclass(frozen=True)
class AxesOfOneRank(ProgramPass):
    """Remove collectives and casts over axes of one rank: the result is the operand, an index is zero."""

    name: ClassVar[str] = "axes of one rank"
    phase: ClassVar[Phase] = Phase.PREPARE
    is_implied: ClassVar[bool] = True
    is_required: ClassVar[bool] = True

    def rewrite(self, unit: Unit) -> None:
        _drop(unit.program.traced, unit.settings.mesh, unit.settings.pipelined)


def _drop(traced: Traced, mesh: Mesh, pipelined: str | None) -> None:
    """Remove collectives in place, except sums over the microbatches of a pipeline, which mark its end."""
    for node in list(traced.nodes):
        call = collective_call(node)
        if call is None or call.kind == "ppermute":  # a ppermute that sends nothing returns zeros
            continue
        if mesh.axis_size(call.axes) > 1 or (call.kind in _REDUCTIONS and pipelined in call.axes):
            continue
        if call.kind == "axis_index":
            aval = info(node).aval
            node.target, node.args = torch.ops.aten.zeros.default, (list(aval.shape),)
            node.kwargs = {"dtype": aval.dtype, "device": aval.device}
        elif info(node).no_grad:  # a derivative stops there
            node.target, node.args = torch.ops.aten.alias.default, (call.operand,)
        else:
            traced.replace(node, call.operand)
