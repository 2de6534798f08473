"""Copies of a slice of nodes: ops that were recorded once are repeated with other operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import fx
from torch.fx.node import Target

from .graph import Args, Kwargs, Traced, tensor_operands, walk_args
from .info import NodeInfo, info
from .source import Source

Rename = Callable[[Source], Source]


class _Op(NamedTuple):
    node: fx.Node
    target: Target
    args: Args
    kwargs: Kwargs
    operands: tuple[int, ...] | None  # positions of the nodes in `args`. None if nodes are elsewhere too
    info: NodeInfo


class Template:
    """Ops of a graph in their order, as they were when the template was made.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> traced = Traced(graph, [x])
    >>> y = traced.call(abs, (x,), NodeInfo())
    >>> copies = Template([y]).stamp(traced, {x: y})
    >>> copies[y].args == (y,), copies[y].target is abs
    (True, True)
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._ops = [_Op(node, node.target, node.args, node.kwargs, _positions(node), info(node)) for node in nodes]

    @property
    def nodes(self) -> list[fx.Node]:
        return [op.node for op in self._ops]

    def stamp(
        self,
        traced: Traced,
        substitution: Mapping[fx.Node, fx.Node],
        rename: Rename | None = None,
        ends: Mapping[fx.Node, tuple[int, Args]] = MappingProxyType({}),
    ) -> dict[fx.Node, fx.Node]:
        """Copy the ops to the insertion point of a graph, with the facts about them. Return the copy of each.

        Args:
            traced: the graph of the template, or another one.
            substitution: what replaces the operands from outside. Other ones are shared, if the graph is the template's
                own; of another graph, all must be given. The result contains these pairs too.
            rename: from the source line of an op to that of its copy, where they differ.
            ends: for ops whose last arguments differ in their copy, the position of the first, and all of them.
        """
        copies = dict(substitution)
        moved: dict[int, Source] = {}  # by identity, because equal lines may be in different stages

        def line_of(source: Source | None) -> Source | None:
            if source is None or rename is None:
                return source
            if id(source) not in moved:
                moved[id(source)] = rename(source)
            return moved[id(source)]

        own = not self._ops or self._ops[0].node.graph is traced.graph

        def copy_of(value: object) -> object:
            if not isinstance(value, fx.Node):
                return value
            return copies.get(value, value) if own else copies[value]

        for node, target, args, kwargs, operands, known in self._ops:
            if operands is None:
                args, kwargs = walk_args((args, kwargs), copy_of)
            else:
                given = list(args)
                for position in operands:
                    given[position] = copy_of(given[position])
                args = tuple(given)
            if node in ends:
                first, rest = ends[node]
                args = (*args[:first], *rest)
            if known.forward_node is not None:
                known = known._replace(forward_node=copies.get(known.forward_node, known.forward_node))
            if rename is not None:
                known = known._replace(source=line_of(known.source), used_at=line_of(known.used_at))
            copies[node] = traced.call(target, args, known, kwargs)
        return copies


def _positions(node: fx.Node) -> tuple[int, ...] | None:
    found = tuple(index for index, value in enumerate(node.args) if isinstance(value, fx.Node))
    return found if len(tensor_operands(node)) == len(found) else None
