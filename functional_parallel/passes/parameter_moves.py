"""Place the moves of parameters that are at rest in another memory: just before their use, again for the backward.

A move before a gather belongs to the gather, whose placement includes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sharding_specs import Mesh

from ..ir import Role, Traced, forward_nodes, info, reached
from ..ops import TO_MEMORY, moved_value
from .gathers import is_gather, only_rearranges
from .program_pass import Phase, ProgramPass
from .recompute import insert_recompute


@dataclass(frozen=True)
class ParameterMoves(ProgramPass):
    """Move each parameter to the device before each use, and drop it after it."""

    name: ClassVar[str] = "parameter moves"
    phase: ClassVar[Phase] = Phase.GATHERS

    def per_microbatch(self, traced: Traced) -> set[fx.Node]:
        return {each for move in _moves(traced) for each in _with_views(move)}.intersection(forward_nodes(traced))

    def run(self, traced: Traced, mesh: Mesh) -> None:
        _read_at_use(traced)
        insert_recompute(traced, self.per_microbatch(traced))
        position = {node: index for index, node in enumerate(traced.graph.nodes)}
        for move in list(_moves(traced)):
            moved = _with_views(move)
            uses = [user for each in moved for user in each.users if user not in moved and user.op != "output"]
            if uses:
                first = min(uses, key=position.__getitem__)
                for each in moved:
                    first.prepend(each)


def _read_at_use(traced: Traced) -> None:
    """Read a parameter on disk before each use, not into the host's memory before the first op."""
    for move in _moves(traced):
        read = moved_value(move)
        if read.target is TO_MEMORY and read.args[1] == "host" and moved_value(read).op == "placeholder":
            move.args = (moved_value(read), "device")
            if not read.users:
                traced.graph.erase_node(read)


def _moves(traced: Traced) -> Iterator[fx.Node]:
    for node in traced.nodes:
        is_move = node.target is TO_MEMORY and node.args[1] == "device" and info(node).role is Role.PARAMETER
        if is_move and not any(is_gather(user) for each in _with_views(node) for user in each.users):
            yield node


def _with_views(move: fx.Node) -> dict[fx.Node, None]:
    return reached([move], lambda node: filter(only_rearranges, node.users))
