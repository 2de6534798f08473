"""Exchange sums with other ops: with sums over other axes, and with ops of one operand that move elements."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from ..ir import REARRANGEMENTS, Traced, info, primitive_name, update_info

aten = torch.ops.aten

# `select` takes one layer of a stack, which the passes keep apart from the stack; `expand` would send more bytes
REARRANGED = REARRANGEMENTS | {aten.slice.Tensor, aten.alias.default}
_LINEAR = REARRANGED | {aten.slice_backward.default, aten.constant_pad_nd.default}  # they move elements, or add zeros


def commutes_with_sum(node: fx.Node) -> bool:
    """Whether an op commutes with a sum over ranks or microbatches; casts of a value's type over an axis do."""
    return node.target in _LINEAR or primitive_name(node) == "pcast"


def is_cast(node: fx.Node) -> bool:
    """Whether an op casts to another dtype."""
    return node.target is aten._to_copy.default


def _widens(node: fx.Node) -> bool:
    """Whether an op casts to a floating-point dtype with more bytes, in which a sum is more exact."""
    return (
        is_cast(node)
        and info(node).aval.dtype.is_floating_point
        and info(node).aval.dtype.itemsize > info(node.args[0]).aval.dtype.itemsize
    )


def move_before_sums(
    traced: Traced,
    reduction: fx.Node,
    is_passed: Callable[[fx.Node], bool],
    through: Callable[[fx.Node], bool] = _widens,
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
    """Return the psums that a reduction is computed from, and the ops between; empty if it has other operands."""
    sums: list[fx.Node] = []
    path: list[fx.Node] = []
    pending = [reduction.args[0]]
    for node in pending:
        if node.op != "call_function" or len(node.users) > 1:
            return [], []
        if primitive_name(node) == "psum" and is_passed(node):
            sums.append(node)
            continue
        path.append(node)
        if node.target is aten.cat.default:  # concatenated gradients
            pending += node.args[0]
        elif commutes_with_sum(node) or through(node):
            pending.append(node.args[0])
        else:
            return [], []
    alike = len({(tuple(node.args[1]), *node.args[2:], info(node.args[0]).type) for node in sums}) == 1
    casts = {axis for node in path if primitive_name(node) == "pcast" for axis in node.args[1]}
    return (sums, path) if alike and not casts.intersection(sums[0].args[1]) else ([], [])


def _swap(traced: Traced, sums: list[fx.Node], ahead: list[fx.Node]) -> None:
    """Keep one of several sums, after the ops of `ahead`. The last of these is the reduction."""
    reduction, axes, last = ahead[-1], tuple(sums[0].args[1]), sums[0]
    state = info(last.args[0]).typed[axes[0]]
    for node in sums:
        node.replace_all_uses_with(node.args[0])
    for node in sums[1:]:
        traced.graph.erase_node(node)
    reduction.append(last)
    reduction.replace_all_uses_with(last)
    traced.outputs = [last if output is reduction else output for output in traced.outputs]
    last.args = (reduction, *last.args[1:])
    update_info(last, val=info(reduction).val, type=info(reduction).type)
    for node in ahead:
        update_info(node, type=info(node).typed.having(axes, state))
