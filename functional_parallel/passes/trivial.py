"""Remove collectives over axes of one rank from a program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, info, primitive_name

_REDUCTIONS = ("psum", "pmax", "pmin")


def drop_size_one_axes(traced: Traced, mesh: Mesh, kept: Sequence[str] = ()) -> Traced:
    """Remove every collective and cast over axes of one rank, in place. Its result is its operand, an index is zero.

    Sums and extrema over axes of `kept` stay nevertheless.
    """
    for node in list(traced.nodes):
        name = primitive_name(node)
        if name is None or name == "ppermute":  # a ppermute that sends nothing returns zeros
            continue
        if name == "axis_index":
            _drop_index(node, mesh)
            continue
        if mesh.axis_size(node.args[1]) > 1:
            continue
        if name in _REDUCTIONS and any(axis in kept for axis in node.args[1]):
            continue
        operand = node.args[0]
        assert isinstance(operand, fx.Node)
        if info(node).no_grad:  # a derivative stops there
            node.target, node.args = torch.ops.aten.alias.default, (operand,)
        else:
            traced.replace(node, operand)
    traced.seal()
    return traced


def _drop_index(node: fx.Node, mesh: Mesh) -> None:
    if mesh.axis_size(node.args[0]) == 1:
        aval = info(node).aval
        node.target, node.args = torch.ops.aten.zeros.default, (list(aval.shape),)
        node.kwargs = {"dtype": aval.dtype, "device": aval.device}
