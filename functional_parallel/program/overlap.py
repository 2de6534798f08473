"""In which order one rank runs a program's ops, so that collectives travel while it computes.

What a collective needs is computed first, then it starts, and what it does not need is computed while it is under way:
in a backward, the gradients of weights while a psum of activations travels (Megatron-LM's overlap of the two halves of
a linear layer's backward, arXiv 2205.05198). What only looks at a value, as views do, is left until something computes
with it, because looking means waiting. The order is a function of the graph alone, so all ranks start the same
collectives in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from ..tracing import Traced
from ..tracing.graph import in_order, operands_of
from .collectives import primitive_name
from .packing import UNPACK
from .sharing import shares_memory, written_by

__all__ = ["STARTED", "is_only_use_of_own_memory", "overlapped"]

STARTED = frozenset({"psum", "psum_scatter", "all_gather", "all_to_all"})  # collectives that can be waited for later


def overlapped(traced: Traced, readers: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
    """The program's ops in an order that keeps collectives under way.

    Args:
        traced: the program.
        readers: per op that writes into its operands, what must have read them before.
    """
    order: dict[fx.Node, None] = {}
    waiting: list[fx.Node] = []
    for node in traced.nodes:
        if primitive_name(node) in STARTED:
            _write(node, order, readers)
            for each in waiting:
                _write(each, order, readers)
            waiting.clear()
        elif not _only_looks(node):
            waiting.append(node)
    for each in [*waiting, *_computed(out for out in traced.outputs if isinstance(out, fx.Node))]:
        _write(each, order, readers)
    return list(order)


def _write(node: fx.Node, order: dict[fx.Node, None], readers: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Append a node, after those of its operands that are not there yet, and those that its writing would disturb."""
    for each in in_order(node, lambda n: [*_computed(operands_of(n)), *readers.get(n, ())], order):
        order[each] = None


def _computed(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.op == "call_function"]


def _only_looks(node: fx.Node) -> bool:
    if primitive_name(node) == "pcast" or node.target in (operator.getitem, UNPACK):
        return True
    return shares_memory(node) and not written_by(node)


def is_only_use_of_own_memory(value: fx.Node) -> bool:
    """Whether a value with one user was computed into memory that nothing else refers to."""
    if value.op != "call_function" or len(value.users) != 1 or primitive_name(value) == "pcast":
        return False
    if value.target is operator.getitem and getattr(value.args[0].target, "owns_results", False):
        return True
    return not shares_memory(value)
