"""Inference of the mesh axes over which values differ between ranks, from the axes of their operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from .graph import Traced, operands_of, primitive_name

AxisSet = frozenset[str]

# return one value to all ranks, or all of what one rank returns; return different values
_EQUALISING = ("psum", "pmax", "pmin", "pbroadcast", "all_gather", "broadcast", "gather", "reduce")
_SPREADING = ("psum_scatter", "pscatter", "all_to_all", "ppermute", "scatter")


def varied_axes(node: fx.Node, operands: Iterable[AxisSet]) -> AxisSet:
    """Return the axes along which the result of an op varies."""
    union: AxisSet = frozenset().union(*operands)
    name = primitive_name(node)
    if name == "axis_index":
        return frozenset(node.args[0])
    if name in _EQUALISING:
        return union - frozenset(node.args[1])
    if name in _SPREADING:
        return union | frozenset(node.args[1])
    return union


def axes_of_nodes(traced: Traced, inputs: Mapping[fx.Node, AxisSet]) -> dict[fx.Node, AxisSet]:
    """Return the axes along which each value of a graph varies, given the axes of its inputs."""
    found = dict(inputs)
    for node in traced.nodes:
        found[node] = varied_axes(node, (found.get(operand, frozenset()) for operand in operands_of(node)))
    return found
