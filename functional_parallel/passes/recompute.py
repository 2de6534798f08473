"""Recompute a forward value for the backward instead of saving it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from ..ir import Traced, info, operands_of, reached


def insert_recompute(
    traced: Traced, dropped: Collection[fx.Node], instead: Mapping[tuple[fx.Node, fx.Node], fx.Node] | None = None
) -> None:
    """Let the backward use copies of the `dropped` forward values, each computed just before its first use there.

    `instead` maps a dropped node and one of its operands to the existing value that the copy reads instead.
    """
    dropped, instead = set(dropped), instead or {}
    position = {node: index for index, node in enumerate(traced.graph.nodes)}
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(traced.nodes):
        if dropped.isdisjoint(operands_of(node)) or not info(node).backward:
            continue
        for needed in sorted(_missing(node, dropped, copies), key=position.__getitem__):
            with traced.graph.inserting_before(node):
                taken = {a: copies.get(a, instead.get((needed, a), a)) for a in operands_of(needed)}
                known = info(needed)._replace(backward=True, recomputed=True, forward_node=needed)
                copies[needed] = traced.add_copy(needed, taken.__getitem__, known)
        for operand in operands_of(node):
            if operand in copies:
                node.replace_input_with(operand, copies[operand])


def _missing(op: fx.Node, dropped: Collection[fx.Node], copies: Collection[fx.Node]) -> dict[fx.Node, None]:
    """Return the dropped values without a copy that an op needs, directly or through other dropped values."""

    def missing(value: fx.Node) -> list[fx.Node]:
        return [each for each in operands_of(value) if each in dropped and each not in copies]

    return reached(missing(op), missing)
