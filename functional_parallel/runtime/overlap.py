"""In which order one rank runs a program's ops, so that collectives travel while it computes.

What a collective needs is computed first, then it starts, and what it does not need is computed while it is under way:
in a backward, the gradients of weights while a psum of activations travels (Megatron-LM's overlap of the two halves of
a linear layer's backward, arXiv 2205.05198). What only looks at a value, as views do, is left until something computes
with it, because looking means waiting. The order is a function of the graph alone, so all ranks start the same
collectives in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from ..program.collectives import primitive_name
from ..program.packing import UNPACK
from ..tracing import Traced
from ..tracing.graph import operands_of

__all__ = ["STARTED", "is_only_use_of_own_memory", "overlapped"]

aten = torch.ops.aten

STARTED = frozenset({"psum", "psum_scatter", "all_gather", "all_to_all"})  # collectives that can be waited for later

_MAY_SHARE_MEMORY = {aten._unsafe_view.default, aten.reshape.default, aten.contiguous.default, aten._to_copy.default}


def overlapped(traced: Traced) -> list[fx.Node]:
    """The program's ops in an order that keeps collectives under way."""
    order: dict[fx.Node, None] = {}
    waiting: list[fx.Node] = []
    for node in traced.nodes:
        if primitive_name(node) in STARTED:
            _write(node, order)
            for each in waiting:
                _write(each, order)
            waiting.clear()
        elif not _only_looks(node):
            waiting.append(node)
    for each in [*waiting, *_computed(out for out in traced.outputs if isinstance(out, fx.Node))]:
        _write(each, order)
    return list(order)


def _write(node: fx.Node, order: dict[fx.Node, None]) -> None:
    """Append a node, after those of its operands that are not there yet."""
    stack = [node]
    while stack:
        last = stack[-1]
        missing = [] if last in order else [each for each in _computed(operands_of(last)) if each not in order]
        if missing:
            stack += reversed(missing)
        else:
            order.setdefault(stack.pop())


def _computed(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    return [node for node in nodes if node.op == "call_function"]


def _only_looks(node: fx.Node) -> bool:
    return primitive_name(node) == "pcast" or node.target in (operator.getitem, UNPACK) or _shares_memory(node)


def _shares_memory(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return target in _MAY_SHARE_MEMORY or any(each.alias_info is not None for each in target._schema.returns)


def is_only_use_of_own_memory(value: fx.Node) -> bool:
    """Whether a value with one user was computed into memory that nothing else refers to."""
    if value.op != "call_function" or len(value.users) != 1 or primitive_name(value) == "pcast":
        return False
    return not _shares_memory(value)
