"""Two sums, one after the other, change places: the sum of sums over other axes is the same sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from ...tracing import Traced
from ..collectives import primitive_name
from .linear import is_linear

__all__ = ["let_pass"]

aten = torch.ops.aten


def let_pass(traced: Traced, reduction: fx.Node, is_passed: Callable[[fx.Node], bool]) -> bool:
    """Move a psum or psum_scatter before the psums of which it is made by linear ops alone, if it is of nothing else.

    Args:
        traced: the graph.
        reduction: what is moved forward; of several psums, laid end to end, one is left behind it.
        is_passed: whether a psum is one of these; they are all over the same axes.

    Returns:
        Whether it was moved.
    """
    sums, path = _sums_before(reduction, is_passed)
    if not sums:
        return False
    _swap(traced, sums, path, reduction)
    return True


def _sums_before(reduction: fx.Node, is_passed: Callable[[fx.Node], bool]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The psums that a reduction is made of, and the ops between; none if it is made of something else too."""
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
        if node.target is aten.cat.default:  # gradients end to end
            pending += node.args[0]
        elif is_linear(node) or _widens(node):
            pending.append(node.args[0])
        else:
            return [], []
    alike = len({(tuple(node.args[1]), *node.args[2:], node.args[0].meta["type"]) for node in sums}) == 1
    casts = {axis for node in path if primitive_name(node) == "pcast" for axis in node.args[1]}
    return (sums, path) if alike and not casts.intersection(sums[0].args[1]) else ([], [])


def _widens(node: fx.Node) -> bool:
    """Whether an op casts to a type in which a sum is the more exact."""
    return (
        node.target is aten._to_copy.default
        and node.meta["val"].dtype.is_floating_point
        and node.meta["val"].dtype.itemsize > node.args[0].meta["val"].dtype.itemsize
    )


def _swap(traced: Traced, sums: list[fx.Node], path: Sequence[fx.Node], reduction: fx.Node) -> None:
    axes, last = tuple(sums[0].args[1]), sums[0]
    state = last.args[0].meta["type"][axes[0]]
    for node in sums:
        node.replace_all_uses_with(node.args[0])
    for node in sums[1:]:
        traced.graph.erase_node(node)
    reduction.append(last)
    reduction.replace_all_uses_with(last)
    traced.outputs = [last if output is reduction else output for output in traced.outputs]
    last.args = (reduction, *last.args[1:])
    last.meta.update(val=reduction.meta["val"], type=reduction.meta["type"])
    for node in (*path, reduction):
        node.meta["type"] = node.meta["type"].having(axes, state)
        node.meta["backward"] = last.meta["backward"]
