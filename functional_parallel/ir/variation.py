"""Inference of the mesh axes where values differ between ranks, from the axes of their operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from .graph import Traced, collective_call, operands_of

AxisSet = frozenset[str]

# they return one value to all ranks, or all of what one rank returns
_EQUALISING = ("psum", "pmax", "pmin", "pbroadcast", "all_gather", "broadcast", "gather", "reduce")


def varied_axes(node: fx.Node, operands: Iterable[AxisSet]) -> AxisSet:
    union: AxisSet = frozenset().union(*operands)
    if (call := collective_call(node)) is None or call.kind == "pcast":
        return union
    return union - set(call.axes) if call.kind in _EQUALISING else union | set(call.axes)


def axes_of_nodes(traced: Traced, inputs: Mapping[fx.Node, AxisSet]) -> dict[fx.Node, AxisSet]:
    found = dict(inputs)
    for node in traced.nodes:
        found[node] = varied_axes(node, (found.get(operand, frozenset()) for operand in operands_of(node)))
    return found
