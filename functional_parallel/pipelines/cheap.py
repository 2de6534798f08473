"""Cheap values are computed again inside each stage of a pipeline, from what it keeps for its backward anyway."""

from __future__ import annotations

from torch import fx

from ..ir import Traced, info, operands_of, update_info
from ..passes import CheapValues
from .roles import OpRole, OpRoles

__all__ = ["recompute_cheap_in_stages"]


def recompute_cheap_in_stages(traced: Traced, roles: OpRoles, stage: dict[fx.Node, int]) -> None:
    """Let every stage's backward compute cheap values again.

    Args:
        traced: the graph, changed in place.
        roles: of its ops; the copies get theirs.
        stage: per staged op its stage; the copies get theirs, and what nothing takes any more has none.
    """
    for copy in _CheapInStages(traced, roles, stage).drop():
        update_info(copy, is_cheap_copy=True)
        stage[copy] = stage[info(copy).forward_node]
        roles.of[copy] = OpRole.STAGED
        roles.backward.add(copy)
        roles.varying.add(copy)
    traced.seal()
    there = set(traced.nodes)
    for gone in [node for node in roles.of if node not in there]:
        del roles.of[gone]
        stage.pop(gone, None)


class _CheapInStages(CheapValues):
    """Values that no other stage's backward takes, from what their own stage's backward takes besides."""

    def __init__(self, traced: Traced, roles: OpRoles, stage: dict[fx.Node, int]) -> None:
        super().__init__(traced)
        self.roles, self.stage = roles, stage
        self.taken = {
            (stage[node], storage)
            for node in self.number
            if node in stage and node in roles.backward
            for operand in operands_of(node)
            for storage in self.ledger.storages[operand]
        }

    def may_drop(self, node: fx.Node) -> bool:
        users = (user for s in self.ledger.made_by(node) for user in self.users(s) if info(user).backward)
        return (
            super().may_drop(node)
            and node in self.stage
            and all(self.stage.get(user) == self.stage[node] for user in users)
        )

    def is_there(self, value: fx.Node, taker: fx.Node, when: int) -> bool:
        own = self.stage[taker]
        if value in self.roles.backward and (self.number[value] >= when or self.stage.get(value, own) != own):
            return False
        storages = self.ledger.storages[value]
        return all(self._is_held(s[0]) or ((own, s) in self.taken and not self._is_made_anew(s[0])) for s in storages)

    def _is_made_anew(self, maker: fx.Node) -> bool:
        """Whether each program that takes a value makes it, as parameters are gathered: one more would gather again."""
        return maker.op == "call_function" and self.roles.is_inline(maker)

    def _is_held(self, maker: fx.Node) -> bool:
        """Whether a value is there throughout a step."""
        once = maker.op != "call_function" or self.roles.of[maker] is OpRole.ONCE
        return once and not self.roles.is_inline(maker)
