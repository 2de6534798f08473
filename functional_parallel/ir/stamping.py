"""Copies of a slice of nodes: ops that were recorded once are repeated with other operands."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import fx
from torch.fx.node import Target

from .graph import Args, Kwargs, Traced, tensor_operands, walk_args
from .info import NodeInfo, info
from .source import Source

aten = torch.ops.aten

_SLICES = {aten.select.int: aten.select_backward.default, aten.slice.Tensor: aten.slice_backward.default}

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
        slices: Iterable[Args] = (),
    ) -> dict[fx.Node, fx.Node]:
        """Copy the ops to the insertion point of a graph, with the facts about them. Return the copy of each.

        Args:
            traced: the graph of the template, or another one.
            substitution: what replaces the operands from outside. Other ones are shared, if the graph is the template's
                own; of another graph, all must be given. The result contains these pairs too.
            rename: from the source line of an op to the source line of its copy, where they differ.
            slices: dims and bounds for the ops that take slices, in order, if they differ.
        """
        copies = dict(substitution)
        moved: dict[int, Source] = {}  # by identity, because equal lines may be in different stages

        def line_of(source: Source | None) -> Source | None:
            if source is None or rename is None:
                return source
            if id(source) not in moved:
                moved[id(source)] = rename(source)
            return moved[id(source)]

        bounds = iter(slices)
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
            if target in _SLICES:
                args = (args[0], *next(bounds, args[1:]))
            if known.forward_node is not None:
                forward = copies.get(known.forward_node, known.forward_node)
                known = known._replace(forward_node=forward)
                if _SLICES.get(forward.target) is target:
                    args = (*args[:2], *forward.args[1:4], *args[5:])
            if rename is not None:
                known = known._replace(source=line_of(known.source), used_at=line_of(known.used_at))
            copies[node] = traced.call(target, args, known, kwargs)
        return copies


def _positions(node: fx.Node) -> tuple[int, ...] | None:
    found = tuple(index for index, value in enumerate(node.args) if isinstance(value, fx.Node))
    return found if len(tensor_operands(node)) == len(found) else None


# --- Slices, such as the layers of stacked weights ---


def slices_of(nodes: Iterable[fx.Node]) -> list[Args]:
    """Return dims and bounds of the slices that ops take, with bounds inside the dims."""
    return [_bounded(node) for node in nodes if node.target in _SLICES]


def _bounded(node: fx.Node) -> Args:
    x, *rest = node.args
    if node.target is aten.slice.Tensor and len(rest) > 2:
        start, end, _ = slice(*rest[1:3]).indices(info(x).aval.shape[rest[0]])
        rest[1:3] = start, max(start, end)
    return tuple(rest)


def has_slices_of(nodes: Iterable[fx.Node], forward: Container[fx.Node]) -> bool:
    """Whether the backward ops add to the slices that the forward ops take."""
    pairs = [(node, info(node).forward_node) for node in nodes if node.target in _SLICES.values()]
    return all(
        of is not None and of in forward and (_SLICES.get(of.target), of.args[1:4]) == (node.target, node.args[2:5])
        for node, of in pairs
    )
