"""Place the moves of parameters that are at rest in another memory: some layers ahead of their use, or their gather.

The backward moves them again. So one layer is computed while the next ones move (ZeRO-Infinity, arXiv 2104.07857 §6.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sharding_specs import Mesh

from ..ir import Role, Traced, first_operand, forward_nodes, info, reached
from ..ops import TO_MEMORY, is_move, moved_value
from .gathers import GatherPlan, is_gather, only_rearranges
from .program_pass import Phase, ProgramPass
from .recompute import insert_recompute


@dataclass(frozen=True)
class ParameterMoves(ProgramPass):
    """Move each parameter to the device `ahead` layers before each use, and drop it after it.

    The move of a parameter that is gathered precedes the gather by so many layers, and its read from a disk the move.
    """

    ahead: int = 1
    name: ClassVar[str] = "parameter moves"
    phase: ClassVar[Phase] = Phase.GATHERS

    def per_microbatch(self, traced: Traced) -> set[fx.Node]:
        return {each for move in _moves(traced) for each in _with_views(move)}.intersection(forward_nodes(traced))

    def run(self, traced: Traced, mesh: Mesh) -> None:
        _read_at_use(traced)
        insert_recompute(traced, self.per_microbatch(traced))
        at_rest = [move for move in _to_device(traced) if _is_of_input(move)]
        FetchPlan(traced, [move for move in _moves(traced) if self.ahead == 0 or move not in at_rest], 0).place()
        if self.ahead:
            FetchPlan(traced, at_rest, self.ahead).place()
        reads = dict.fromkeys(moved_value(move) for move in _to_device(traced) if is_move(moved_value(move)))
        GatherPlan(traced, list(reads), self.ahead).place()


class FetchPlan(GatherPlan):
    def first_use(self, gather: fx.Node) -> int:
        return min(super().first_use(gather), self.next_gather(gather))


def _read_at_use(traced: Traced) -> None:
    """Read a parameter on disk before each use, not into the host's memory before the first op."""
    for move in _moves(traced):
        read = moved_value(move)
        if read.target is TO_MEMORY and read.args[1] == "host" and moved_value(read).op == "placeholder":
            move.args = (moved_value(read), "device")
            if not read.users:
                traced.graph.erase_node(read)


def _moves(traced: Traced) -> Iterator[fx.Node]:
    for node in _to_device(traced):
        if not any(is_gather(user) for each in _with_views(node) for user in each.users):
            yield node


def _to_device(traced: Traced) -> Iterator[fx.Node]:
    for node in traced.nodes:
        if node.target is TO_MEMORY and node.args[1] == "device" and info(node).role is Role.PARAMETER:
            yield node


def _is_of_input(value: fx.Node) -> bool:
    while value.op == "call_function" and (is_move(value) or only_rearranges(value)):
        value = moved_value(value) if is_move(value) else first_operand(value)
    return bool(value.op == "placeholder")


def _with_views(move: fx.Node) -> dict[fx.Node, None]:
    return reached([move], lambda node: filter(only_rearranges, node.users))
