"""Find values that may share memory, and ops that write into it. All but `view_base` are conservative."""

from __future__ import annotations

import operator
from functools import lru_cache

import torch
from torch import fx
from torch.fx.node import Target

from ..ir import Traced, first_operand, info, operands_of, primitive_name, reached, viewed_argument
from ..ops import PACK, UNPACK_INTO

aten = torch.ops.aten

_SHARES_STORAGE = {aten._unsafe_view.default, aten.lift_fresh.default}  # though their schemas do not declare it
_MAY_SHARE_MEMORY = {aten._unsafe_view.default, aten.reshape.default, aten.contiguous.default, aten._to_copy.default}


def shares_memory(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return target in _MAY_SHARE_MEMORY or any(each.alias_info is not None for each in target._schema.returns)


def view_base(node: fx.Node) -> fx.Node | None:
    if primitive_name(node) == "pcast" or node.target in _SHARES_STORAGE or node.target is operator.getitem:
        return first_operand(node)
    position = viewed_argument(node.target)
    base = node.args[position] if position is not None and position < len(node.args) else None
    return base if isinstance(base, fx.Node) else None  # autograd calls conj with a number


def mutated_operands(node: fx.Node) -> list[fx.Node]:
    written: list[fx.Node] = []
    for index, name in _mutated_arguments(node.target):
        value = node.args[index] if index < len(node.args) else node.kwargs[name]
        written += value if isinstance(value, (list, tuple)) else [value]
    return written


@lru_cache(maxsize=4096)
def _mutated_arguments(target: Target) -> tuple[tuple[int, str], ...]:
    arguments = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
    found = ((index, each.name, each.alias_info) for index, each in enumerate(arguments))
    return tuple((index, name) for index, name, alias in found if alias is not None and alias.is_write)


def _may_alias(node: fx.Node) -> bool:
    """Whether the result may share an operand's memory in some runtime: a collective of one rank may skip the copy."""
    return primitive_name(node) is not None or shares_memory(node)


def aliases_of(value: fx.Node) -> dict[fx.Node, None]:
    """Return the value, and all values computed from it that may share its memory, except results of in-place ops."""

    def aliases(node: fx.Node) -> list[fx.Node]:
        users = (user for user in node.users if user.op == "call_function")
        return [user for user in users if _may_alias(user) and not mutated_operands(user)]

    return reached([value], aliases)


def storage_root(value: fx.Node) -> fx.Node:
    """Return the earliest value that another was computed from without leaving its memory, as far as is known."""
    while value.op == "call_function" and _may_alias(value) and operands_of(value) and not mutated_operands(value):
        value = operands_of(value)[0]
    return value


def readers_before_writes(traced: Traced) -> dict[fx.Node, list[fx.Node]]:
    """Map each op that writes to the ops that must have read the old values before."""
    position = {node: index for index, node in enumerate(traced.nodes)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in position:
        roots = dict.fromkeys(storage_root(value) for value in mutated_operands(node))
        if roots:
            readers = {user: None for root in roots for alias in aliases_of(root) for user in alias.users}
            found[node] = [user for user in readers if position.get(user, len(position)) < position[node]]
    for gather in position:
        if primitive_name(gather) == "all_gather":
            into = [user for user in gather.users if user.target is UNPACK_INTO]
            readers = dict.fromkeys(reader for user in into for reader in found[user])
            if into and all(position[reader] < position[gather] for reader in readers):
                found[gather] = list(readers)
    return found


def is_only_use_of_own_memory(value: fx.Node) -> bool:
    """Whether a value has one user, and no other value except its base, if it is a view, refers to its memory."""
    if value.op != "call_function" or len(value.users) != 1:
        return False
    if value.target is operator.getitem:
        return getattr(value.args[0].target, "owns_results", False) or not shares_memory(value.args[0])
    written = mutated_operands(value)
    base = written[0] if len(written) == 1 else view_base(value)
    return not shares_memory(value) if base is None else is_only_use_of_own_memory(base)


def may_stay_in_place(part: fx.Node) -> bool:
    """Whether a slice of a parameter, which is always allocated, needs no separate copy."""
    whole = first_operand(part)
    while primitive_name(whole) == "pcast":
        whole = first_operand(whole)
    return bool(info(whole).is_parameter) and all(_is_done_with(part, user) for user in part.users)


def _is_done_with(value: fx.Node, user: fx.Node) -> bool:
    if user.op != "call_function" or primitive_name(user) is not None or user.target is PACK:
        return False
    written = mutated_operands(user)
    if value not in written:
        return not shares_memory(user)
    results = [each for each in user.users if each.target is operator.getitem and written[each.args[1]] is value]
    return len(written) > 1 and all(_only_sends(each) for result in results for each in result.users)


def _only_sends(user: fx.Node) -> bool:
    return user.target is PACK or primitive_name(user) == "all_gather"
