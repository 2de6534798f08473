"""Exchange sums with other ops: with sums over other axes, and with ops of one operand that move elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from ..ir import (
    REARRANGEMENTS,
    Traced,
    change_call,
    collective_call,
    first_operand,
    info,
    operands_of,
    primitive_name,
    the_call,
    update_info,
)

aten = torch.ops.aten

# `select` takes one layer of a stack, which the passes keep apart from the stack; `expand` would send more bytes
_REARRANGED = REARRANGEMENTS | {aten.slice.Tensor, aten.alias.default, aten.detach.default}
_FILLED = {aten.slice_backward.default, aten.constant_pad_nd.default}  # they move elements, and add zeros


def is_view(node: fx.Node) -> bool:
    """Whether an op moves elements of one value, or casts its type over an axis."""
    return node.target in _REARRANGED or primitive_name(node) == "pcast"


def commutes_with_sum(node: fx.Node) -> bool:
    return is_view(node) or node.target in _FILLED


def is_cast(node: fx.Node) -> bool:
    return node.target is aten._to_copy.default


def widens(node: fx.Node) -> bool:
    """Whether an op casts to a floating-point dtype with more bytes, where a sum is more exact."""
    return (
        is_cast(node)
        and info(node).aval.dtype.is_floating_point
        and info(node).aval.dtype.itemsize > info(node.args[0]).aval.dtype.itemsize
    )


def move_before_sums(
    traced: Traced,
    reduction: fx.Node,
    is_passed: Callable[[fx.Node], bool],
    through: Callable[[fx.Node], bool] = widens,
) -> list[fx.Node]:
    """Move a psum or psum_scatter before other psums, if it is computed from them alone, through linear ops.

    Return the ops that are now before the sum: the reduction and the ops between; none if it was not moved. All psums
    must be over the same axes, and `is_passed`. Of several concatenated psums, one is left after the reduction. A cast
    may be between if it is `through`.
    """
    sums, path = _sums_before(reduction, is_passed, through)
    if not sums:
        return []
    _swap(traced, sums, [*path, reduction])
    return [*path, reduction]


def _sums_before(
    reduction: fx.Node, is_passed: Callable[[fx.Node], bool], through: Callable[[fx.Node], bool]
) -> tuple[list[fx.Node], list[fx.Node]]:
    sums: list[fx.Node] = []
    path: list[fx.Node] = []
    pending = [first_operand(reduction)]
    for node in pending:
        if node.op != "call_function" or len(node.users) > 1:
            return [], []
        if primitive_name(node) == "psum" and is_passed(node):
            sums.append(node)
            continue
        path.append(node)
        if node.target is aten.cat.default:  # concatenated gradients
            pending += operands_of(node)
        elif commutes_with_sum(node) or through(node):
            pending.append(first_operand(node))
        else:
            return [], []
    calls = [the_call(node) for node in sums]
    alike = len({(replace(call, operand=None), info(call.operand).type) for call in calls}) == 1
    casts = {axis for node in path if (call := collective_call(node, "pcast")) for axis in call.axes}
    return (sums, path) if alike and casts.isdisjoint(calls[0].axes) else ([], [])


def _swap(traced: Traced, sums: list[fx.Node], ahead: list[fx.Node]) -> None:
    """Keep one of several sums, after the ops of `ahead`. The last of these is the reduction."""
    reduction, last = ahead[-1], sums[0]
    call = the_call(last)
    state = info(call.operand).typed[call.axes[0]]
    for node in sums:
        node.replace_all_uses_with(first_operand(node))
    for node in sums[1:]:
        traced.graph.erase_node(node)
    reduction.append(last)
    traced.redirect(reduction, last)
    change_call(last, operand=reduction)
    update_info(last, val=info(reduction).val, type=info(reduction).type)
    for node in ahead:
        update_info(node, type=info(node).typed.having(call.axes, state))
