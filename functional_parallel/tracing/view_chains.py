"""Views of one memory in a trace, which has values alone: what a write through one of them makes of the others.

Tensors that share memory are chains of views of one value, their root. A write through one gives a new root, in which
the chain's inverse has put the new part; all others are taken of that root again. Nodes that nothing needs in the end,
the most of them, are dropped with the trace's other dead code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from ..ir import Aval, NodeInfo, getitem, info

__all__ = ["View", "ViewChains", "are_apart"]

aten = torch.ops.aten

Create = Callable[[Any, tuple[Any, ...], dict[str, Any], NodeInfo], fx.Node]


@dataclass(frozen=True)
class View:
    """One view of a chain: the op, what it takes beside the tensor, and what it was taken of."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: Aval
    info: NodeInfo  # of the node that took it first

    def part(self) -> tuple[int, range] | None:
        """The dim and the indices of it that a part is; None for what is no part along a dim."""
        given = dict(zip(("dim", "start", "end", "step"), self.args, strict=False), **self.kwargs)
        if self.op not in (aten.select.int, aten.slice.Tensor):
            return None
        dim = given.get("dim", 0) % self.source.ndim
        size = self.source.shape[dim]
        if self.op is aten.select.int:
            index = self.args[1] % size
            return dim, range(index, index + 1)
        return dim, range(size)[given.get("start") : given.get("end") : given.get("step", 1)]


class ViewChains:
    """The chains of views of a recording.

    Args:
        create: writes a node, `create(op, args, kwargs, info)`.
    """

    def __init__(self, create: Create) -> None:
        self._create = create
        self._views: dict[fx.Node, fx.Node] = {}  # the same value as a view of what its root is now
        self._roots: set[fx.Node] = set()

    def chain(self, node: fx.Node) -> tuple[fx.Node, list[View]]:
        """The value that a tensor is a view of, and by which views; the value itself with no views if it is none."""
        views: list[View] = []
        while True:
            node = self._views.get(node, node)
            found = None if node in self._roots else _view(node)
            if found is None:
                return node, views[::-1]
            views.append(found[1])
            node = found[0]

    def is_root(self, node: fx.Node) -> None:
        """Say that a value has memory of its own, though it may be computed by turning round another."""
        self._roots.add(node)

    def taken(self, root: fx.Node, views: Sequence[View]) -> fx.Node:
        """A chain of views of another value."""
        for view in views:
            root = self._create(view.op, (root, *view.args), view.kwargs, view.info)
        return root

    def is_view_of(self, node: fx.Node, root: fx.Node, views: Sequence[View]) -> None:
        """Say that a value is also what this chain takes of the new root: no need to compute it from there."""
        self._views[node] = self.taken(root, views)

    def written(self, root: fx.Node, views: Sequence[View], part: fx.Node, known: NodeInfo) -> fx.Node | None:
        """The root with a new value where the chain leads to; None where a view has no inverse."""
        if not views:
            return part
        first, *rest = views
        inner = self.written(self.taken(root, [first]), rest, part, known)
        known = replace(known, val=first.source)
        if inner is None:
            return None
        if first.op in _SCATTERS:
            return self._create(_SCATTERS[first.op], (root, inner, *first.args), first.kwargs, known)
        if first.op not in _INVERSES:
            return None
        op, args = _INVERSES[first.op](first)
        return self._create(op, (inner, *args), {}, known)


def are_apart(one: Sequence[View], other: Sequence[View]) -> bool:
    """Whether two chains of views of one value are known to lead to parts without a common element."""
    for a, b in zip(one, other, strict=False):
        if (a.op, a.args, a.kwargs) != (b.op, b.args, b.kwargs):
            mine, theirs = a.part(), b.part()
            if mine is None or theirs is None or mine[0] != theirs[0]:
                return False
            return max(mine[1].start, theirs[1].start) >= min(mine[1].stop, theirs[1].stop)
    return False


# -----------------------------------------------------------------------------
# Single views
# -----------------------------------------------------------------------------

_SHARE_UNDECLARED = {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}


def _view(node: fx.Node) -> tuple[fx.Node, View] | None:
    """What a node is a view of, and how."""
    if node.op != "call_function":
        return None
    if node.target is getitem:
        return _member(node)
    if not _is_view(node.target):
        return None
    source = node.args[0]
    return source, View(node.target, tuple(node.args[1:]), dict(node.kwargs), info(source).aval, info(node))


def _is_view(op: Any) -> bool:
    if op in _SHARE_UNDECLARED:
        return True
    if op is aten.as_strided.default or not isinstance(op, torch._ops.OpOverload):
        return False
    alias = op._schema.arguments[0].alias_info if op._schema.arguments else None
    return alias is not None and not alias.is_write


def _member(node: fx.Node) -> tuple[fx.Node, View] | None:
    """A member of a split is a slice, one of an unbind a selection."""
    members, index = node.args
    if not _is_view(members.target):
        return None
    source = members.args[0]
    given = dict(zip(("self", "sizes", "dim"), members.args, strict=False), **members.kwargs)
    if members.target is aten.unbind.int:
        return source, View(aten.select.int, (given.get("sizes", 0), index), {}, info(source).aval, info(node))
    dim = given.get("dim", 0)
    ends = list(accumulate(aval.shape[dim] for aval in info(members).avals))
    args = (dim, [0, *ends][index], ends[index])
    return source, View(aten.slice.Tensor, args, {}, info(source).aval, info(node))


_SCATTERS = {  # the op that writes a part back where a view took it from
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}


def _reshaped(view: View) -> tuple[Any, tuple[Any, ...]]:
    return aten.view.default, (list(view.source.shape),)


def _unpermuted(view: View) -> tuple[Any, tuple[Any, ...]]:
    dims = [dim % view.source.ndim for dim in view.args[0]]
    return aten.permute.default, ([dims.index(dim) for dim in range(len(dims))],)


def _again(view: View) -> tuple[Any, tuple[Any, ...]]:
    return view.op, view.args


_INVERSES: dict[Any, Callable[[View], tuple[Any, tuple[Any, ...]]]] = {
    aten.alias.default: _reshaped,
    aten.permute.default: _unpermuted,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.t.default: _again,
    aten.transpose.int: _again,
    aten.unsqueeze.default: _reshaped,
    aten.view.default: _reshaped,
    aten._unsafe_view.default: _reshaped,
    aten._conj.default: _again,
    aten._neg_view.default: _again,
    aten.view_as_complex.default: lambda _: (aten.view_as_real.default, ()),
    aten.view_as_real.default: lambda _: (aten.view_as_complex.default, ()),
}
