"""Flat FX graph of aten ops and named collectives, the result of a trace.

`info(node)` returns shape, source line and other facts about a node; see `NodeInfo`.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx
from torch.fx.node import Argument, Target

from .. import _torch
from ..collectives import CollectiveCall, call_of, primitive_of
from .info import NodeInfo, info, set_info, update_info
from .source import Source

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

Args: TypeAlias = tuple[Argument, ...]
Kwargs: TypeAlias = dict[str, Argument]


@dataclass
class Traced:
    graph: fx.Graph
    inputs: list[fx.Node] = field(default_factory=list)  # placeholders of the arguments
    outputs: list[Any] = field(default_factory=list)  # nodes, or Python values that are returned unchanged
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # by the name of their `get_attr` node
    captured: list[torch.Tensor] = field(default_factory=list)  # tensors of an enclosing trace
    captured_inputs: list[fx.Node] = field(default_factory=list)  # their placeholders
    layout_reads: dict[int, Any] = field(default_factory=dict)  # a `LayoutRead` per input on whose strides it depends

    @property
    def nodes(self) -> Iterator[fx.Node]:
        """Ops in order, without placeholders, constants and the output."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    def copy(self) -> tuple[Traced, dict[fx.Node, fx.Node]]:
        """Copy the function into a separate graph, for a tentative rewrite. Also return the copy of each node."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        copied = Traced(graph, [], [], dict(self.constants), list(self.captured), [], dict(self.layout_reads))
        for node in self.graph.nodes:
            known = info(node)
            if node.op == "call_function":
                if known.forward_node is not None:
                    known = known._replace(forward_node=copies.get(known.forward_node, known.forward_node))
                copies[node] = copied.add_copy(node, copies.__getitem__, known)
            elif node.op != "output":
                copies[node] = graph.node_copy(node)
                set_info(copies[node], known)
        copied.inputs = [copies[node] for node in self.inputs]
        copied.captured_inputs = [copies[node] for node in self.captured_inputs]
        copied.outputs = [copies[output] if isinstance(output, fx.Node) else output for output in self.outputs]
        copied.seal()
        return copied, copies

    def call(self, op: Target, args: Args, known: NodeInfo, kwargs: Kwargs | None = None) -> fx.Node:
        """Add an op at the insertion point of the graph, with the facts about it."""
        node = _torch.add_call(self.graph, op, args, kwargs)
        set_info(node, known)
        return node

    def add_copy(self, node: fx.Node, operand: Callable[[fx.Node], fx.Node], known: NodeInfo) -> fx.Node:
        """Copy an op of this or another graph to the insertion point, with its operands there."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operand)
        copy = _torch.add_call(self.graph, node.target, args, kwargs, node.name)
        set_info(copy, known)
        return copy

    def emit(self, call: CollectiveCall, known: NodeInfo) -> fx.Node:
        return self.call(call.target, call.args, known, call.kwargs)

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Replace `node` by another value, also in the outputs, and erase `node`. The graph must be sealed."""
        # References from outside the graph's edges, such as of a backward op to its forward, read `replaced_by`.
        self.redirect(node, by)
        update_info(node, replaced_by=by)
        self.graph.erase_node(node)

    def redirect(self, node: fx.Node, to: fx.Node) -> None:
        """Let all ops but `to` itself, and the outputs, read `to` instead of `node`."""
        is_returned = any(user.op == "output" for user in node.users)
        node.replace_all_uses_with(to, delete_user_cb=lambda user: user is not to)
        if is_returned:
            self.outputs = [to if output is node else output for output in self.outputs]

    @contextmanager
    def without_output(self) -> Iterator[dict[fx.Node, fx.Node]]:
        """Erase the output node for a rewrite that replaces many results, and seal the graph afterwards.

        A change of an operand takes time in proportion to the number of operands. The caller enters the values that it
        replaced into the dict, with the values to return instead.
        """
        new: dict[fx.Node, fx.Node] = {}
        self.graph.erase_node(self.graph.output_node())
        yield new
        self.outputs = [new.get(output, output) if isinstance(output, fx.Node) else output for output in self.outputs]
        self.seal()

    def returned(self) -> set[fx.Node]:
        return {output for output in self.outputs if isinstance(output, fx.Node)}

    def seal(self) -> None:
        """Set the output node of the graph from `outputs`, and erase nodes that no output needs."""
        for node in list(self.graph.find_nodes(op="output")):
            self.graph.erase_node(node)
        self.graph.output(tuple(self.outputs))
        for node in reversed(list(self.graph.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users:
                self.graph.erase_node(node)


def forget_rewrites(graph: fx.Graph) -> None:
    """Delete information that only passes use: names, replacements of erased ops, and forwards of backward ops."""
    for node in graph.nodes:
        known = info(node)
        if known.forward_node is not None or known.replaced_by is not None or known.implicit_cast:
            set_info(node, known._replace(forward_node=None, replaced_by=None, implicit_cast=False))
    _torch.forget_names(graph)


def primitive_name(node: fx.Node) -> str | None:
    """Return `"psum"` for a node that calls `torch.ops.fp.psum`. None for an op that is not a primitive."""
    return primitive_of(node.target)


def collective_call(node: fx.Node, *kinds: str) -> CollectiveCall | None:
    """Return the call of a node that is a primitive, of one of these kinds if any are given. None for another op."""
    kind = primitive_name(node)
    if kind is None or (kinds and kind not in kinds):
        return None
    return call_of(kind, node.args, node.kwargs)


def the_call(node: fx.Node) -> CollectiveCall:
    call = collective_call(node)
    assert call is not None, f"{node.target} is not a collective"
    return call


def change_call(node: fx.Node, **changes: Any) -> None:
    call = replace(the_call(node), **changes)
    node.args, node.kwargs = call.args, call.kwargs


def first_operand(node: fx.Node) -> fx.Node:
    return operands_of(node)[0]


def source_of(node: fx.Node) -> Source | None:
    return info(node).source


def implied_source(node: fx.Node) -> Source | None:
    source = info(node).source
    return None if source is None else replace(source, implied=True)


def where(node: fx.Node) -> str:
    return f"{node.target} at {source_of(node) or 'an unknown line'}"


def tensor_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a node in order of appearance, with repetitions."""
    found: list[fx.Node] = []
    walk_args((node.args, node.kwargs), lambda value: found.append(value) if isinstance(value, fx.Node) else None)
    return found


def operands_of(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = node.all_input_nodes
    return found


def topological_order(wanted: K, needed: Callable[[K], Iterable[K]], done: Container[K]) -> Iterator[K]:
    """Yield `wanted` and everything that it needs, if not done yet. Each item follows the items that it needs.

    It does not use recursion, because a norm is a chain with one sum per parameter. The caller must add each yielded
    item to `done` before it requests the next.

    >>> done = {}
    >>> for each in topological_order(6, lambda number: [number // 2, number // 3] if number > 1 else [], done):
    ...     done[each] = "done"
    >>> list(done)
    [1, 3, 0, 2, 6]
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


def reached(starts: Iterable[K], step: Callable[[K], Iterable[K]]) -> dict[K, None]:
    """Return `starts` and everything that repeated steps lead to from them, in breadth-first order.

    >>> list(reached([6, 5], lambda number: [number // 2] if number > 1 else []))
    [6, 5, 3, 2, 1]
    """
    found = dict.fromkeys(starts)
    waiting = deque(found)
    while waiting:
        fresh = [each for each in dict.fromkeys(step(waiting.popleft())) if each not in found]
        found.update(dict.fromkeys(fresh))
        waiting += fresh
    return found


def named_arguments(op: _torch.Op, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> dict[str, Argument]:
    """Return the arguments of a call of an op, by the names in its schema, without omitted arguments."""
    return {**dict(zip((each.name for each in op._schema.arguments), args, strict=False)), **kwargs}


def argument(node: fx.Node, name: str) -> Argument:
    """Return an argument of an op by its name in the schema, or its default. None if the schema has no such name.

    >>> x = fx.Graph().placeholder("x")
    >>> unbind = x.graph.call_function(torch.ops.aten.unbind.int, (x,))
    >>> argument(unbind, "dim"), argument(unbind, "keepdim")
    (0, None)
    """
    position, default = _parameters(node.target).get(name, (len(node.args), None))
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


@lru_cache(maxsize=4096)
def _parameters(op: _torch.Op) -> dict[str, tuple[int, Argument]]:
    return {each.name: (index, each.default_value) for index, each in enumerate(op._schema.arguments)}


def walk_args(args: T, visit: Callable[[Argument], Argument]) -> T:
    """Rebuild an argument structure (tuples, lists, dicts, slices) with `visit` applied to every leaf."""
    rebuilt: T = fx.node.map_aggregate(args, visit)
    return rebuilt


getitem = operator.getitem
