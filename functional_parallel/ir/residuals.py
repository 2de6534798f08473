"""Values that the backward of a step reads from its forward."""

from __future__ import annotations

from torch import fx

from .graph import Traced, operands_of
from .info import info


def residuals(traced: Traced) -> dict[fx.Node, list[fx.Node]]:
    """Return the values of the forward that the backward reads, each with the ops of the backward that read it.

    Inputs are not residuals. Of a view, this is the view itself, which keeps the memory of its base.
    """
    position = {node: index for index, node in enumerate(traced.nodes)}
    found = {}
    for node in position:
        readers = [] if info(node).backward else [user for user in node.users if info(user).backward]
        if readers:
            found[node] = sorted(readers, key=position.__getitem__)
    return found


def forward_nodes(traced: Traced) -> list[fx.Node]:
    """Return the ops of the forward: no backward ops, and no ops that depend on them, such as an optimizer's update."""
    later: set[fx.Node] = set()
    found = []
    for node in traced.nodes:
        if info(node).backward or not later.isdisjoint(operands_of(node)):
            later.add(node)
        else:
            found.append(node)
    return found
