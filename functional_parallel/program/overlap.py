"""In which order one rank runs a program's ops, so that collectives travel while it computes.

What a collective needs is computed first, then it starts, and what it does not need is computed while it is under way:
in a backward, the gradients of weights while a psum of activations travels (Megatron-LM's overlap of the two halves of
a linear layer's backward, arXiv 2205.05198). What only looks at a value, as views do, is left until something computes
with it, because looking means waiting. Gathers of parameters could start at any time: they keep the place that they
were given, since what is gathered earlier than it needs to be takes memory. The order is a function of the graph alone,
so all ranks start the same collectives in the same order.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from ..ir import Traced, info, operands_of, primitive_name, topological_order
from ..ops import PACK, UNPACK
from .aliasing import mutated_operands, shares_memory

__all__ = ["STARTED", "one_scatter_at_a_time", "overlapped"]

STARTED = frozenset({"psum", "psum_scatter", "all_gather", "all_to_all"})  # collectives that can be waited for later


def overlapped(traced: Traced, readers: Mapping[fx.Node, Sequence[fx.Node]]) -> list[fx.Node]:
    """The program's ops in an order that keeps collectives under way.

    Args:
        traced: the program.
        readers: per op that writes into its operands, what must have read them before.
    """
    order: dict[fx.Node, None] = {}
    waiting: list[fx.Node] = []
    stored = {node for node in traced.inputs if info(node).is_parameter}  # and what is made of parameters alone
    for node in traced.nodes:
        if stored.issuperset(operands_of(node)):
            stored.add(node)
        if primitive_name(node) in STARTED:
            _write([*waiting, node] if node in stored else [node, *waiting], order, readers)
            waiting.clear()
        elif not _only_looks(node):
            waiting.append(node)
    _write([*waiting, *_computed(out for out in traced.outputs if isinstance(out, fx.Node))], order, readers)
    return list(order)


def one_scatter_at_a_time(order: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Per reduce-scatter, or what is packed for it just before, the one that must have ended by then.

    A gradient's sum is needed at the end of a step, but until somebody waits for it the whole gradient is kept, and so
    a step would keep all of them. FSDP too waits for the one before.

    Args:
        order: a program's ops as they run.
    """
    scatters = [index for index, node in enumerate(order) if primitive_name(node) == "psum_scatter"]
    found = {}
    for last, index in itertools.pairwise(scatters):
        is_packed_for = order[index - 1].target is PACK and order[index - 1] in operands_of(order[index])
        found[order[index - is_packed_for]] = [order[last]]
    return found


def _write(nodes: Iterable[fx.Node], order: dict[fx.Node, None], readers: Mapping[fx.Node, Sequence[fx.Node]]) -> None:
    """Append ops, each after those of its operands that are not there yet, and those that its writing would disturb."""
    for node in nodes:
        for each in topological_order(node, lambda n: [*_computed(operands_of(n)), *readers.get(n, ())], order):
            order[each] = None


def _computed(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.op == "call_function"]


def _only_looks(node: fx.Node) -> bool:
    if primitive_name(node) == "pcast" or node.target in (operator.getitem, UNPACK):
        return True
    return shares_memory(node) and not mutated_operands(node)
