"""What a trace yields: a flat FX graph of aten ops and named collectives, with shapes and source lines beside it.

`info(node)` returns what is known of a node; see `NodeInfo`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import fx

from .. import _torch
from ..collectives import primitive_of
from .aval import Aval, aval_of, hollow, without_memory
from .info import info, set_info, update_info
from .source import Source

__all__ = [
    "Aval",
    "Traced",
    "argument",
    "aval_of",
    "forget_rewrites",
    "hollow",
    "named_arguments",
    "operands_of",
    "primitive_name",
    "source_of",
    "tensor_operands",
    "topological_order",
    "walk_args",
    "where",
    "without_memory",
]

K = TypeVar("K", bound=Hashable)


@dataclass
class Traced:
    """A traced function: flat tensors in, flat values out.

    `inputs` are the placeholders in argument order; `captured` are tensors of an enclosing trace that the function
    closed over, with the placeholders that stand for them in `captured_inputs`; `constants` are real tensors met on the
    way, by the name of their `get_attr` node. `outputs` hold nodes, or Python values returned as they are.
    `layout_reads` has a `LayoutRead` for each input, by number, whose strides the graph depends on.
    """

    graph: fx.Graph
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    captured: list[torch.Tensor] = field(default_factory=list)
    captured_inputs: list[fx.Node] = field(default_factory=list)
    layout_reads: dict[int, Any] = field(default_factory=dict)

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """The ops in order, without placeholders, constants and the output."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def copy(self) -> tuple[Traced, dict[fx.Node, fx.Node]]:
        """The same function in a graph of its own, for a rewrite on trial; and each node's copy."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.graph.nodes:
            if node.op != "output":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                set_info(copies[node], info(node))
                if info(node).forward_node is not None:
                    update_info(copies[node], forward_node=copies.get(info(node).forward_node, info(node).forward_node))
        copied = Traced(
            graph,
            [copies[node] for node in self.inputs],
            [copies[output] if isinstance(output, fx.Node) else output for output in self.outputs],
            dict(self.constants),
            list(self.captured),
            [copies[node] for node in self.captured_inputs],
            dict(self.layout_reads),
        )
        copied.seal()
        return copied, copies

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let one value stand for another, outputs included, and drop that op.

        What refers to the op from outside the graph, as a backward op does to its forward, finds the new one under
        `replaced_by`.
        """
        node.replace_all_uses_with(by)
        update_info(node, replaced_by=by)
        self.outputs = [by if output is node else output for output in self.outputs]
        self.graph.erase_node(node)

    def settle(self) -> None:
        """Say that no more rewrites come; see `forget_rewrites`."""
        forget_rewrites(self.graph)

    def seal(self) -> None:
        """Set the graph's output node from `outputs` and drop what no output needs."""
        for node in list(self.graph.nodes):
            if node.op == "output":
                self.graph.erase_node(node)
        self.graph.output(tuple(self.outputs))
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users:
                self.graph.erase_node(node)


def forget_rewrites(graph: fx.Graph) -> None:
    """Forget what only rewrites ask for: names, which ops were erased, and what a backward op is the backward of."""
    for node in graph.nodes:
        known = info(node)
        if known.forward_node is not None or known.replaced_by is not None or known.implicit_cast:
            set_info(node, replace(known, forward_node=None, replaced_by=None, implicit_cast=False))
    _torch.forget_names(graph)


def primitive_name(node: fx.Node) -> str | None:
    """`"psum"` for a node that calls `torch.ops.fp.psum`; None for an op that is no primitive."""
    return primitive_of(node.target)


def source_of(node: fx.Node) -> Source | None:
    return info(node).source


def where(node: fx.Node) -> str:
    """An op and its source line, for messages."""
    return f"{node.target} at {source_of(node) or 'an unknown line'}"


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """The node's operands in order of appearance, each occurrence counted."""
    found: list[fx.Node] = []
    walk_args((node.args, node.kwargs), lambda value: found.append(value) if isinstance(value, fx.Node) else None)
    return found


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The values an op takes, each once."""
    return list(dict.fromkeys(tensor_operands(node)))


def topological_order(wanted: K, needed: Callable[[K], Iterable[K]], done: Container[K]) -> Iterator[K]:
    """What is not done yet of something and all that it needs, each after what it needs itself.

    Not by recursion: a norm is a chain of as many sums as there are parameters.

    >>> done = {}
    >>> for each in in_order(6, lambda number: [number // 2, number // 3] if number > 1 else [], done):
    ...     done[each] = "done"
    >>> list(done)
    [1, 3, 0, 2, 6]

    Args:
        wanted: what is to be done in the end.
        needed: what something needs, in the order in which to do it.
        done: what is done; the caller adds each to it before asking for the next.
    """
    waiting = [wanted]
    while waiting:
        last = waiting[-1]
        missing = [] if last in done else [each for each in needed(last) if each not in done]
        if missing:
            waiting += reversed(missing)
            continue
        waiting.pop()
        if last not in done:
            yield last


def named_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an op is called on, by the names in its schema; without those that it was not given."""
    return {**dict(zip((each.name for each in op._schema.arguments), args, strict=False)), **kwargs}


def argument(node: fx.Node, name: str) -> Any:
    """What an op takes under a name of its schema: as it was given, else the default; None where there is no such name.

    >>> x = fx.Graph().placeholder("x")
    >>> unbind = x.graph.call_function(torch.ops.aten.unbind.int, (x,))
    >>> argument(unbind, "dim"), argument(unbind, "keepdim")
    (0, None)
    """
    position, default = _parameters(node.target).get(name, (len(node.args), None))
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


@lru_cache(maxsize=4096)
def _parameters(op: Any) -> dict[str, tuple[int, Any]]:
    """Where an op takes its arguments, and what stands for them if it is not given any."""
    return {each.name: (index, each.default_value) for index, each in enumerate(op._schema.arguments)}


def walk_args(args: Any, visit: Callable[[Any], Any]) -> Any:
    """Rebuild an argument structure (tuples, lists, dicts, slices) with `visit` applied to every leaf."""
    return fx.node.map_aggregate(args, visit)


getitem = operator.getitem
