"""Let optimizer updates overwrite their operands, all parameters in one call, if no op reads the old values.

A training step with a donated state (`train_step(donate=True)`) may change it. That saves memory, copies of new
parameters and moments, and one kernel call per parameter. Parameters with updated shards that are gathered from all
ranks (ZeRO stages 1 and 2) are gathered into the old parameters. An op that writes rows into a donated value, like a
cache of keys and values, writes them in place.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, first_operand, info, operands_of, primitive_name
from ..ops import ADAMW, ADAMW_IN_PLACE, MOVE_INTO, PACK, SLICE_SCATTER_IN_PLACE, TO_MEMORY, UNPACK, UNPACK_INTO
from ..program import aliases_of, memories_of, shares_memory, storage_root
from .program_pass import Phase, ProgramPass, Scope, Settings
from .update_groups import is_gradient_fetch

aten = torch.ops.aten

INTO_OLD = {UNPACK: UNPACK_INTO, TO_MEMORY: MOVE_INTO}
WRITES_IN_PLACE = {
    aten.index_copy.default: aten.index_copy_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.slice_scatter.default: SLICE_SCATTER_IN_PLACE,
}


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
        _skip_inside(traced)
        with traced.without_output() as new:
            _merge_all(traced, new)
        _write_into_old(traced, mesh)
        _write_rows(traced)


def _skip_inside(traced: Traced) -> None:
    """Let an update itself skip, instead of a choice between its old and new values, which needs both."""
    for update in [node for node in traced.nodes if node.target is ADAMW and len(node.args) == _WITHOUT_SKIP]:
        choices = [(result.args[1], user) for result in update.users for user in result.users]
        old = (update.args[0], *update.args[2:4])
        conditions = {user.args[0] for _, user in choices}
        are_all = len(choices) == len(old) == len(update.users) and len(conditions) == 1
        if not (are_all and all(user.target is aten.where.self and user.args[1] is old[i] for i, user in choices)):
            continue
        if any(info(condition).aval.ndim for condition in conditions):  # of each element, as of a flat vector
            continue
        with traced.graph.inserting_before(min(user for _, user in choices)):
            skipping = traced.call(ADAMW, (*update.args, *conditions), info(update))
            results = {index: traced.call(operator.getitem, (skipping, index), info(user)) for index, user in choices}
        for index, user in choices:
            traced.replace(user, results[index])
        for each in (*update.users, update):
            traced.graph.erase_node(each)


_WITHOUT_SKIP = 10  # arguments of an update


def _merge_all(traced: Traced, new: dict[fx.Node, fx.Node]) -> None:
    position, memories = {node: index for index, node in enumerate(traced.nodes)}, memories_of(traced)
    returned = traced.returned()
    open_: dict[Hashable, list[fx.Node]] = {}
    waiting: dict[fx.Node, Hashable] = {}
    for node in position:
        read = [] if node.target is operator.getitem else operands_of(node)
        asked = {waiting.get(value.args[0]) for value in read if value.target is operator.getitem}
        asked.update(open_ if is_gradient_fetch(node) else ())  # of the next group: this group's are released
        for key in [key for key in open_ if key in asked] if asked else ():
            _merge(traced, open_.pop(key), new, returned, before=node)
        if node.target is ADAMW and _may_be_overwritten(node, position, returned):
            waiting[node] = key = _key(node, memories[node])
            open_.setdefault(key, []).append(node)
    for group in open_.values():
        _merge(traced, group, new, returned)


def _may_be_overwritten(update: fx.Node, position: dict[fx.Node, int], returned: set[fx.Node]) -> bool:
    roots = {storage_root(value) for value in update.args[:4]}
    held = (update.args[0], *update.args[2:4])
    return len(roots) == 4 and all(_dies_at(update, value, position, returned) for value in held)


def _dies_at(update: fx.Node, value: fx.Node, position: dict[fx.Node, int], returned: set[fx.Node]) -> bool:
    root = storage_root(value)
    if root.op != "call_function" and not info(root).donated:
        return False
    aliases = aliases_of(root)
    users = {user for alias in aliases for user in alias.users if user not in aliases}
    return (
        _is_whole(value, root)
        and not any(alias in returned for alias in aliases)
        and all(position[user] <= position[update] for user in users if user.op != "output")
    )


def _is_whole(value: fx.Node, root: fx.Node) -> bool:
    """Whether a value is not a view: an input, a result, or a collective's result computed from one of them."""
    while value is not root and (primitive_name(value) is not None or value.target is operator.getitem):
        value = first_operand(value)
    return value is root


def _key(update: fx.Node, memory: str) -> Hashable:
    """Key that updates must share to be merged: settings, dtype, memory, ranks, and the bucket they wait for."""
    aval = info(update.args[0]).aval
    root = update.args[1]
    while root.op == "call_function" and primitive_name(root) is None and shares_memory(root):
        root = first_operand(root)
    source = root if primitive_name(root) is not None and first_operand(root).target is PACK else None
    type_, stops = info(update.args[0]).type, info(update).no_grad
    return (*update.args[4:], aval.dtype, aval.device, memory, type_, stops, source)


def _merge(
    traced: Traced,
    updates: list[fx.Node],
    new: dict[fx.Node, fx.Node],
    returned: set[fx.Node],
    before: fx.Node | None = None,
) -> None:
    """Merge updates before an op, or at the end. `new` gets the new value of each of their results."""
    first = updates[0]
    held = [update.args[kind] for kind in (0, 2, 3) for update in updates]
    gradients = [update.args[1] for update in updates]
    with traced.graph.inserting_after() if before is None else traced.graph.inserting_before(before):
        known = info(first)._replace(val=tuple(info(value).aval for value in held))
        merged = traced.call(ADAMW_IN_PLACE, (held, gradients, *first.args[4:]), known)
        for index, update in enumerate(updates):
            for old in list(update.users):
                place = old.args[1] * len(updates) + index
                new[old] = traced.call(operator.getitem, (merged, place), info(old))
                returned.update([new[old]] if old in returned else [])
                old.replace_all_uses_with(new[old])
                traced.graph.erase_node(old)
            traced.graph.erase_node(update)


def _write_into_old(traced: Traced, mesh: Mesh) -> None:
    """Write a value that is unpacked from a bucket, or moved, into the donated input that it replaces.

    No op may read the input later. It has the memory of its new value, as both have one spec.
    """
    position = {node: index for index, node in enumerate(traced.nodes)}
    counts, returned = Counter(traced.outputs), traced.returned()
    for old in traced.inputs:
        index = info(old).updated_output
        new = traced.outputs[index] if index is not None else None
        if not (isinstance(new, fx.Node) and new.target in INTO_OLD and info(new).val == info(old).val):
            continue
        if counts[new] == 1 and _varies_alike(old, new, mesh) and _dies_at(new, old, position, returned):
            new.target, new.args = INTO_OLD[new.target], (old, *new.args)


def _varies_alike(old: fx.Node, new: fx.Node, mesh: Mesh) -> bool:
    """Whether two values vary along the same axes. Along an axis of one rank, nothing varies."""
    types = [info(each).type for each in (old, new)]
    known = [{axis: each[axis] for axis in each if mesh.axis_size(axis) > 1} for each in types if each is not None]
    return new.target is UNPACK or types[0] == types[1] or (len(known) == 2 and known[0] == known[1])


def _write_rows(traced: Traced) -> None:
    """Write rows in place into a donated input that no other op reads later.

    The rows vary along the same axes as the input: simulated ranks that hold equal values share their memory.
    """
    position, returned = {node: index for index, node in enumerate(traced.nodes)}, traced.returned()
    counts, written = Counter(traced.outputs), set[fx.Node]()
    for node in position:
        if node.target not in WRITES_IN_PLACE or counts[node] > 1:
            continue
        held, *others = operands_of(node)
        is_apart = all(storage_root(other) is not storage_root(held) for other in others)
        is_state = held in written or (storage_root(held).op == "placeholder" and info(held).type is not None)
        if is_state and is_apart and info(held).type == info(node).type and _dies_at(node, held, position, returned):
            written.add(node)
            node.target = WRITES_IN_PLACE[node.target]
