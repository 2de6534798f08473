"""Along which mesh axes a value differs from rank to rank, from those of what it is made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from .graph import Traced, operands_of, primitive_name

__all__ = ["AxisSet", "axes_of_nodes", "varied_axes"]

AxisSet = frozenset[str]

_EQUALISING = ("psum", "pmax", "pmin", "pbroadcast", "all_gather")
_SPREADING = ("psum_scatter", "pscatter", "all_to_all", "ppermute")


def varied_axes(node: fx.Node, operands: Iterable[AxisSet]) -> AxisSet:
    """The rule: collectives that end in one value for all remove their axes, those that end in many add them."""
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
    """The axes of all values of a graph, from those of its inputs."""
    found = dict(inputs)
    for node in traced.nodes:
        found[node] = varied_axes(node, (found.get(operand, frozenset()) for operand in operands_of(node)))
    return found
