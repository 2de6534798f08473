"""Which values may lie in the same memory, and which ops write into it.

Everything here errs on the safe side: two values may share memory if some runtime lets them.
"""

from __future__ import annotations

import torch
from torch import fx

from ..tracing import Traced
from ..tracing.graph import operands_of
from .collectives import primitive_name

__all__ = ["aliases_of", "readers_before_writes", "root_of", "shares_memory", "written_by"]

aten = torch.ops.aten

_MAY_SHARE_MEMORY = {aten._unsafe_view.default, aten.reshape.default, aten.contiguous.default, aten._to_copy.default}


def shares_memory(node: fx.Node) -> bool:
    """Whether an op's result may lie in its operand's memory, by the op's schema."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return target in _MAY_SHARE_MEMORY or any(each.alias_info is not None for each in target._schema.returns)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The operands that an op writes into; its results are these, in their order."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written: list[fx.Node] = []
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs[argument.name]
            written += value if isinstance(value, (list, tuple)) else [value]
    return written


def _may_alias(node: fx.Node) -> bool:
    """Whether the result may lie in an operand's memory in some runtime: a collective of one rank need not copy."""
    return primitive_name(node) is not None or shares_memory(node)


def aliases_of(value: fx.Node) -> dict[fx.Node, None]:
    """The value, and all that may lie in its memory and was made from it, but not what an op wrote there."""
    found = {value: None}
    waiting = [value]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and user not in found and _may_alias(user) and not written_by(user):
                found[user] = None
                waiting.append(user)
    return found


def root_of(value: fx.Node) -> fx.Node:
    """The value from which another was made without leaving its memory, as far as one can tell."""
    while value.op == "call_function" and _may_alias(value) and operands_of(value) and not written_by(value):
        value = operands_of(value)[0]
    return value


def readers_before_writes(traced: Traced) -> dict[fx.Node, list[fx.Node]]:
    """Per op that writes, the ops that must have read what was there before."""
    position = {node: index for index, node in enumerate(traced.nodes)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in position:
        roots = dict.fromkeys(root_of(value) for value in written_by(node))
        if roots:
            readers = {user: None for root in roots for alias in aliases_of(root) for user in alias.users}
            found[node] = [user for user in readers if position.get(user, len(position)) < position[node]]
    return found
