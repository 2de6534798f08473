"""Let optimizer updates overwrite their operands, all parameters in one call, if no op reads the old values.

A training step whose state is donated (`train_step(donate=True)`) may change it. That saves memory, copies of new
parameters and moments, and one kernel call per parameter. Parameters with updated shards that are gathered from all
ranks (ZeRO stages 1 and 2) are gathered into the old parameters.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, first_operand, info, operands_of, primitive_name
from ..ops import ADAMW, ADAMW_IN_PLACE, PACK, UNPACK, UNPACK_INTO
from ..program import aliases_of, shares_memory, storage_root
from .program_pass import Phase, ProgramPass, Scope, Settings


@dataclass(frozen=True)
class InPlaceUpdates(ProgramPass):
    """Merge the updates of donated parameters into few calls that write in place."""

    name: ClassVar[str] = "in place"
    phase: ClassVar[Phase] = Phase.IN_PLACE
    scope: ClassVar[Scope] = Scope.STAGE

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [cls()] if settings.options.donate else []

    def run(self, traced: Traced, mesh: Mesh) -> None:
        if not any(info(node).donated for node in traced.inputs):
            return
        position = {node: index for index, node in enumerate(traced.nodes)}
        open_: dict[Hashable, list[fx.Node]] = {}
        for node in list(position):
            for key, group in list(open_.items()):
                if _asks_for(node, group):
                    _merge(traced, open_.pop(key), before=node)
            if node.target is ADAMW and _may_be_overwritten(node, position, traced.outputs):
                open_.setdefault(_key(node), []).append(node)
        for group in open_.values():
            _merge(traced, group, before=traced.graph.output_node())
        _unpack_into_old(traced)


def _asks_for(node: fx.Node, group: list[fx.Node]) -> bool:
    if node.target is operator.getitem:
        return False
    return any(value.target is operator.getitem and value.args[0] in group for value in operands_of(node))


def _may_be_overwritten(update: fx.Node, position: dict[fx.Node, int], outputs: list[object]) -> bool:
    roots = {storage_root(value) for value in update.args[:4]}
    held = (update.args[0], *update.args[2:4])
    return len(roots) == 4 and all(_dies_at(update, value, position, outputs) for value in held)


def _dies_at(update: fx.Node, value: fx.Node, position: dict[fx.Node, int], outputs: list[object]) -> bool:
    root = storage_root(value)
    if root.op != "call_function" and not info(root).donated:
        return False
    aliases = aliases_of(root)
    users = {user for alias in aliases for user in alias.users if user not in aliases}
    return (
        _is_whole(value, root)
        and not any(alias in outputs for alias in aliases)
        and all(position[user] <= position[update] for user in users if user.op != "output")
    )


def _is_whole(value: fx.Node, root: fx.Node) -> bool:
    """Whether a value is not a view: an input, a result, or a collective's result computed from one of them."""
    while value is not root and (primitive_name(value) is not None or value.target is operator.getitem):
        value = first_operand(value)
    return value is root


def _key(update: fx.Node) -> Hashable:
    """Key that updates must share to be merged: settings, dtype, device, ranks, and the bucket they wait for."""
    aval = info(update.args[0]).aval
    root = update.args[1]
    while root.op == "call_function" and primitive_name(root) is None and shares_memory(root):
        root = first_operand(root)
    source = root if primitive_name(root) is not None and first_operand(root).target is PACK else None
    type_, stops = info(update.args[0]).type, info(update).no_grad
    return (*update.args[4:], aval.dtype, aval.device, type_, stops, source)


def _merge(traced: Traced, updates: list[fx.Node], before: fx.Node) -> None:
    first = updates[0]
    held = [update.args[kind] for kind in (0, 2, 3) for update in updates]
    gradients = [update.args[1] for update in updates]
    with traced.graph.inserting_before(before):
        known = info(first)._replace(val=tuple(info(value).aval for value in held))
        merged = traced.call(ADAMW_IN_PLACE, (held, gradients, *first.args[4:]), known)
        new: dict[fx.Node, fx.Node] = {}
        for index, update in enumerate(updates):
            for old in list(update.users):
                place = old.args[1] * len(updates) + index
                new[old] = traced.call(operator.getitem, (merged, place), info(old))
    for old, value in new.items():
        old.replace_all_uses_with(value)
        traced.graph.erase_node(old)
    traced.outputs = [new.get(output, output) if isinstance(output, fx.Node) else output for output in traced.outputs]
    for update in updates:
        traced.graph.erase_node(update)


def _unpack_into_old(traced: Traced) -> None:
    """Write a value unpacked from a bucket into the donated input that it replaces, if no op reads the input later."""
    position = {node: index for index, node in enumerate(traced.nodes)}
    for old in traced.inputs:
        index = info(old).updated_output
        new = traced.outputs[index] if index is not None else None
        if not (isinstance(new, fx.Node) and new.target is UNPACK and info(new).val == info(old).val):
            continue
        if traced.outputs.count(new) == 1 and _dies_at(new, old, position, traced.outputs):
            new.target, new.args = UNPACK_INTO, (old, *new.args)
