"""Moves between memories: one transfer for each bucket, early to the host, and before the ops that share its memory.

A collective sums a bucket of gradients, and its slices are updated on the host. The bucket moves, and is sliced there.
New parameters are packed on the host, and the pack moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Aval, NodeInfo, Role, Traced, first_operand, info, operands_of, update_info
from ..ops import PACK, TO_MEMORY, is_number
from ..program import memories_of
from .program_pass import Phase, ProgramPass, Scope
from .swap import is_cast, is_view, widens

aten = torch.ops.aten
_SQUARES = torch.ops.fp.sum_of_squares.default


@dataclass(frozen=True)
class HostMoves(ProgramPass):
    """Move full buckets, as soon as they are reduced, and packs of new parameters."""

    name: ClassVar[str] = "host moves"
    phase: ClassVar[Phase] = Phase.MOVES
    scope: ClassVar[Scope] = Scope.STAGE

    def run(self, traced: Traced, mesh: Mesh) -> None:
        memories = memories_of(traced)
        down = [n for n in traced.nodes if n.target is TO_MEMORY and (memories[first_operand(n)], memories[n]) == _DOWN]
        _merge_numbers(traced, [move for move in down if is_number(move)])
        gradients = [n for n in down if not is_number(n) and info(n).role is not Role.PARAMETER]
        whole = _move_wholes(traced, gradients)
        for move in whole:
            _place_early(move)
        _add_early(traced, whole)
        _sum_squares_early(traced, {first_operand(move) for move in whole})
        _pack_before_moves(traced)


_DOWN = ("device", "host")


def _merge_numbers(traced: Traced, moves: list[fx.Node]) -> None:
    first: dict[fx.Node, fx.Node] = {}
    for move in moves:
        kept = first.setdefault(first_operand(move), move)
        if kept is not move:
            traced.replace(move, kept)


def _move_wholes(traced: Traced, moves: list[fx.Node]) -> list[fx.Node]:
    """Move values instead of all their slices, and before they are widened. Return the moves."""
    found: list[fx.Node] = []
    for root, paths in _before_moves(moves).items():
        group = list(paths)
        if root.op != "call_function" or not any(paths.values()):
            found += group
            continue
        with traced.graph.inserting_after(root):
            known = info(group[0])._replace(val=_on(info(root).aval, group[0]))
            moved = traced.call(TO_MEMORY, (root, "host"), known, group[0].kwargs)
        copies = {root: moved}
        for move in group:
            with traced.graph.inserting_before(move):
                for each in paths[move]:
                    if each not in copies:
                        known = info(each)._replace(val=_on(info(each).aval, move))
                        copies[each] = traced.add_copy(each, _reader(copies), known)
            traced.replace(move, copies[paths[move][-1] if paths[move] else root])
        found.append(moved)
    return found


def _before_moves(moves: list[fx.Node]) -> dict[fx.Node, dict[fx.Node, list[fx.Node]]]:
    """Return the values to move, each with the moves that it replaces, and the ops between."""
    paths, sizes = {move: _path(move) for move in moves}, defaultdict[fx.Node, int](int)
    for move, path in paths.items():
        sizes[first_operand([*path, move][0])] += info(move).aval.numel
    found = defaultdict[fx.Node, dict[fx.Node, list[fx.Node]]](dict)
    for move, path in paths.items():
        if sizes[root := first_operand([*path, move][0])] != info(root).aval.numel:  # some slices stay on the device
            path = path[next((index for index, each in enumerate(path) if widens(each)), len(path)) :]
        found[first_operand([*path, move][0])][move] = path
    return found


def _reader(copies: dict[fx.Node, fx.Node]) -> Callable[[fx.Node], fx.Node]:
    return lambda operand: copies[operand]


def _path(move: fx.Node) -> list[fx.Node]:
    """Return the views and wider casts of a value before its move, in order."""
    path: list[fx.Node] = []
    value = first_operand(move)
    while value.op == "call_function" and (is_view(value) or widens(value)):
        path.insert(0, value)
        value = first_operand(value)
    return path


def _on(aval: Aval, like: fx.Node) -> Aval:
    return replace(aval, device=info(like).aval.device)


def _add_early(traced: Traced, moves: Iterable[fx.Node]) -> None:
    """Add the gradients of microbatches when they are on the host, so that only their sum waits there."""
    there = set(moves)
    for node in list(traced.nodes):
        if (is_view(node) or node.target is aten.add.Tensor) and there.issuperset(operands_of(node)):
            there.add(node)
            _place_early(node)


def _sum_squares_early(traced: Traced, moved: set[fx.Node]) -> None:
    """Sum the squares of each gradient where it is, added in the same order, so that no gradient waits for the last."""
    for node in list(traced.nodes):
        if node.target is not _SQUARES or moved.isdisjoint(map(_root, node.args[0])):
            continue
        total = None
        for tensor in node.args[0]:
            with traced.graph.inserting_before(node):
                one = traced.call(_SQUARES, ([tensor],), _of_one(node, tensor))
                total = one if total is None else traced.call(aten.add.Tensor, (total, one), info(node))
            for each in [*_chain(tensor), one]:
                _place_early(each)
        assert total is not None
        traced.replace(node, total)


def _of_one(node: fx.Node, tensor: fx.Node) -> NodeInfo:
    dtype = info(tensor).aval.dtype
    wide = dtype if dtype.itemsize >= 4 else torch.float32
    return info(node)._replace(val=replace(info(node).aval, dtype=wide))


def _chain(value: fx.Node) -> list[fx.Node]:
    """Return the views, casts and quotients by a number that compute a value, in order."""
    found: list[fx.Node] = []
    while value.op == "call_function" and _only_scales(value):
        found.insert(0, value)
        value = first_operand(value)
    return found


def _only_scales(value: fx.Node) -> bool:
    return is_view(value) or is_cast(value) or (value.target is aten.div.Tensor and is_number(operands_of(value)[-1]))


def _root(value: fx.Node) -> fx.Node:
    chain = _chain(value)
    return first_operand(chain[0]) if chain else value


def _place_early(node: fx.Node) -> None:
    """Move an op to the position where its operands are computed."""
    ready = max(operands_of(node))
    if ready.op == "call_function":
        ready.append(node)


def _pack_before_moves(traced: Traced) -> None:
    for pack in [node for node in traced.nodes if node.target in (PACK, aten.cat.default)]:
        moves = list(pack.args[0])
        if not all(each.target is TO_MEMORY and each.args[1] == "device" and len(each.users) == 1 for each in moves):
            continue
        first = moves[0]
        max(moves).append(pack)  # which may be some layers before the gather
        with traced.graph.inserting_after(pack):
            moved = traced.call(TO_MEMORY, (pack, "device"), info(pack), first.kwargs)
        pack.replace_all_uses_with(moved, delete_user_cb=lambda user, moved=moved: user is not moved)
        pack.args = ([first_operand(each) for each in moves], *pack.args[1:])
        update_info(pack, val=_on(info(pack).aval, first_operand(first)))
        for each in moves:
            traced.graph.erase_node(each)
