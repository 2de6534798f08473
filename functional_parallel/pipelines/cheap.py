"""Recomputation of cheap values in each stage of a pipeline, from values that are saved for its backward anyway."""

from __future__ import annotations

from torch import fx

from ..ir import Traced, info, operands_of, update_info
from ..passes import CheapValues
from .roles import OpRole, OpRoles


def recompute_cheap_in_stages(traced: Traced, roles: OpRoles, stage: dict[fx.Node, int]) -> None:
    """Let the backward of every stage recompute cheap values. `roles` and `stage` gain copies and lose erased ops."""
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
    """Cheap values that only the backward of their own stage reads, with operands that this backward reads anyway."""

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
        """Whether each user program computes the value itself, like a gathered parameter. A copy would re-gather it."""
        return maker.op == "call_function" and self.roles.is_inline(maker)

    def _is_held(self, maker: fx.Node) -> bool:
        """Whether a value is in memory for the entire step."""
        once = maker.op != "call_function" or self.roles.of[maker] is OpRole.ONCE
        return once and not self.roles.is_inline(maker)
