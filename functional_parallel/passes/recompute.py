"""Recompute a forward value for the backward instead of saving it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import TypeVar

from torch import fx

from ..ir import Traced, info, operands_of, reached, set_info

K = TypeVar("K", bound=Hashable)


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
        if not info(node).backward:
            continue
        for needed in sorted(missing_values(node, operands_of, dropped, copies), key=position.__getitem__):
            with traced.graph.inserting_before(node):
                taken = {a: copies.get(a, instead.get((needed, a), a)) for a in operands_of(needed)}
                copy = copies[needed] = traced.graph.node_copy(needed, taken.__getitem__)
            set_info(copy, info(needed)._replace(backward=True, recomputed=True, forward_node=needed))
        for operand in operands_of(node):
            if operand in copies:
                node.replace_input_with(operand, copies[operand])


def missing_values(
    op: K, operands: Callable[[K], Iterable[K]], dropped: Collection[K], copies: Collection[K]
) -> set[K]:
    """Return the dropped values without a copy that an op needs, directly or through other dropped values."""

    def missing(value: K) -> list[K]:
        return [each for each in operands(value) if each in dropped and each not in copies]

    return set(reached(missing(op), missing))
