"""Which cheap values a stage's backward computes again, and which it keeps: what its stage keeps anyway decides.

The pass that chose them saw the whole step, where a value is alive as long as any stage needs it.
"""

from __future__ import annotations

from torch import fx

from ..program.memory import Ledger, Storage
from ..tracing import Traced
from ..tracing.graph import operands_of
from .roles import Role, Roles, is_view

__all__ = ["keep_unless_free"]


def keep_unless_free(traced: Traced, roles: Roles, stage: dict[fx.Node, int]) -> None:
    """Let a stage keep a cheap value that it could compute again only by keeping another for it.

    Args:
        traced: the graph; copies of what is kept are taken out of it.
        roles: of its ops.
        stage: per staged op its stage; what is taken out loses it.
    """
    copies = [node for node in traced.nodes if node.meta.get("cheap")]
    if not copies:
        return
    kept = _Kept(traced, roles, stage)
    for node in copies:
        forward = node.meta["forward"]
        while "merged" in forward.meta:
            forward = forward.meta["merged"]
        if stage.get(node) is None or stage.get(node) != stage.get(forward) or not kept.suffices(node):
            traced.replace(node, forward)
            stage.pop(node, None)
    for node in reversed(copies):
        if "merged" not in node.meta and not node.users:
            traced.graph.erase_node(node)
            stage.pop(node)


class _Kept:
    """What a stage's backward takes besides cheap copies."""

    def __init__(self, traced: Traced, roles: Roles, stage: dict[fx.Node, int]) -> None:
        self.roles, self.stage = roles, stage
        self.storages = Ledger("", traced).storages
        self.taken: set[tuple[int, Storage]] = set()
        for node in traced.nodes:
            if node in roles.backward and node in stage and not node.meta.get("cheap"):
                for operand in operands_of(node):
                    self.taken.update((stage[node], storage) for storage in self.storages[operand])

    def suffices(self, copy: fx.Node) -> bool:
        """Whether all that a copy takes is there for its stage's backward anyway."""
        return all(self._is_there(operand, self.stage[copy]) for operand in operands_of(copy))

    def _is_there(self, value: fx.Node, stage: int) -> bool:
        if value.meta.get("cheap"):
            return self.stage[value] == stage
        if value.op != "call_function" or (is_view(value) and self._is_there(operands_of(value)[0], stage)):
            return True
        if self.roles.of[value] is Role.ONCE and not self.roles.is_inline(value):
            return True
        return all((stage, storage) in self.taken for storage in self.storages[value])
