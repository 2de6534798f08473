"""Sum gradients over microbatches on the host: each moves there as soon as it is computed, and is added there.

A step moves complete sums to the host. The pass exchanges the sum over microbatches and the move. A collective between
them needs the sum on the device: the sum moves there, one bucket after another, and the result back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ...ir import Aval, Traced, change_call, first_operand, info, primitive_name, reached, update_info
from ...ops import TO_MEMORY
from ..program_pass import Phase, ProgramPass
from ..swap import commutes_with_sum, is_cast
from .sums_once import is_total


@dataclass(frozen=True)
class SumsOnHost(ProgramPass):
    """Add the gradients of microbatches on the host, so that the device never holds their sum."""

    axis: str  # of microbatches
    name: ClassVar[str] = "sums on the host"
    phase: ClassVar[Phase] = Phase.TYPES

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for total in [node for node in traced.nodes if is_total(node, self.axis) and info(node).backward]:
            following, operand = reached([total], lambda node: filter(_precedes_move, node.users)), first_operand(total)
            for move in [user for node in following for user in node.users if _is_down(user)][:1]:
                with traced.graph.inserting_before(total):
                    known = info(operand)._replace(val=_there(operand, move))
                    down = traced.call(TO_MEMORY, (operand, "host"), known, move.kwargs)
                change_call(total, operand=down)
                _leave_there(traced, total, move)


def _leave_there(traced: Traced, value: fx.Node, move: fx.Node) -> None:
    """Leave a value, and views and casts of it, where `move` moves values. For other ops it moves to the device."""
    known = info(value)._replace(role=None)  # as it brings no gradient to the update
    with traced.graph.inserting_before(min(value.users)):
        up = traced.call(TO_MEMORY, (value, "device"), known, {"device": known.aval.device})
    traced.redirect(value, up)
    update_info(value, val=_there(value, move))
    for user in list(up.users):
        if _is_down(user):
            traced.replace(user, value)
        elif _only_moves(user):
            user.replace_input_with(up, value)
            _leave_there(traced, user, move)


def _is_down(node: fx.Node) -> bool:
    return node.target is TO_MEMORY and node.args[1] == "host"


def _precedes_move(node: fx.Node) -> bool:
    is_join = node.target in (torch.ops.aten.cat.default, torch.ops.aten.add.Tensor)
    return _only_moves(node) or is_join or primitive_name(node) in ("psum", "psum_scatter")


def _only_moves(node: fx.Node) -> bool:
    return commutes_with_sum(node) or is_cast(node)


def _there(node: fx.Node, move: fx.Node) -> Aval:
    return replace(info(node).aval, device=info(move).aval.device)
