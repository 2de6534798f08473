"""Views of one memory in a trace, which has only values: the effect of a write through one view on the others.

Tensors that share memory are chains of views of one value, their root. A write through a chain creates a new root. The
inverse of the chain puts the new values into it, and all other chains are recomputed from it. Most of these nodes are
not needed in the end, and are dropped with the other dead code of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import fx
from torch.fx.node import Target

from .. import _torch
from ..ir import Args, Aval, Kwargs, NodeInfo, argument, getitem, info, viewed_argument

aten = torch.ops.aten

Create = Callable[[_torch.Op, Args, Kwargs, NodeInfo], fx.Node]


@dataclass(frozen=True)
class View:
    """One view of a chain: the op, its arguments after the tensor, and the Aval of the viewed value."""

    op: _torch.Op
    args: Args
    kwargs: Kwargs
    source: Aval
    info: NodeInfo  # of the node that first computed it

    def part(self) -> tuple[int, range] | None:
        """Return the dim and the indices along it that the view selects. None if it is not a slice of one dim."""
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
    """Chains of views of a recording. `create(op, args, kwargs, info)` writes their nodes."""

    def __init__(self, create: Create) -> None:
        self._create = create
        self._views: dict[fx.Node, fx.Node] = {}  # the same value as a view of its current root
        self._roots: set[fx.Node] = set()

    def chain(self, node: fx.Node) -> tuple[fx.Node, list[View]]:
        """Return the root of a value and the views that lead to it. If it is not a view, the value and no views."""
        views: list[View] = []
        while True:
            node = self._views.get(node, node)
            found = None if node in self._roots else _view(node)
            if found is None:
                return node, views[::-1]
            views.append(found[1])
            node = found[0]

    def of(self, nodes: Collection[fx.Node]) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
        """Return what is declared of some values now. Later writes change it."""
        return {node: self._views[node] for node in nodes if node in self._views}, self._roots.intersection(nodes)

    def copy(self, declared: tuple[dict[fx.Node, fx.Node], set[fx.Node]], copies: Mapping[fx.Node, fx.Node]) -> None:
        """Declare of the copies of values what was declared of the values."""
        views, roots = declared
        self._views.update((copies[node], copies.get(view, view)) for node, view in views.items())
        self._roots.update(map(copies.__getitem__, roots))

    def is_root(self, node: fx.Node) -> None:
        """Declare that a value has separate memory, even if a view op such as a transposition computes it."""
        self._roots.add(node)

    def taken(self, root: fx.Node, views: Sequence[View]) -> fx.Node:
        for view in views:
            root = self._create(view.op, (root, *view.args), view.kwargs, view.info)
        return root

    def is_view_of(self, node: fx.Node, root: fx.Node, views: Sequence[View]) -> None:
        """Declare that a value equals this chain of views of the new root, so it is not recomputed from the root."""
        self._views[node] = self.taken(root, views)

    def written(self, root: fx.Node, views: Sequence[View], part: fx.Node, known: NodeInfo) -> fx.Node | None:
        """Return the root with a new value at the end of the chain. None if a view does not have an inverse."""
        if not views:
            return part
        first, *rest = views
        inner = self.written(self.taken(root, [first]), rest, part, known)
        known = known._replace(val=first.source)
        if inner is None:
            return None
        if first.op in _SCATTERS:
            return self._create(_SCATTERS[first.op], (root, inner, *first.args), first.kwargs, known)
        if first.op not in _INVERSES:
            return None
        op, args = _INVERSES[first.op](first)
        return self._create(op, (inner, *args), {}, known)


def are_apart(one: Sequence[View], other: Sequence[View]) -> bool:
    for a, b in zip(one, other, strict=False):
        if (a.op, a.args, a.kwargs) != (b.op, b.args, b.kwargs):
            mine, theirs = a.part(), b.part()
            if mine is None or theirs is None or mine[0] != theirs[0]:
                return False
            return max(mine[1].start, theirs[1].start) >= min(mine[1].stop, theirs[1].stop)
    return False


# --- Single views ---

_SHARE_UNDECLARED = {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}


def _view(node: fx.Node) -> tuple[fx.Node, View] | None:
    if node.op != "call_function":
        return None
    if node.target is getitem:
        return _member(node)
    if not _is_view(node.target):
        return None
    source = node.args[0]
    return source, View(node.target, tuple(node.args[1:]), dict(node.kwargs), info(source).aval, info(node))


def _is_view(op: Target) -> bool:
    return op in _SHARE_UNDECLARED or (op is not aten.as_strided.default and viewed_argument(op) == 0)


def _member(node: fx.Node) -> tuple[fx.Node, View] | None:
    members, index = node.args
    if not _is_view(members.target):
        return None
    source, dim = members.args[0], argument(members, "dim")
    if members.target is aten.unbind.int:
        return source, View(aten.select.int, (dim, index), {}, info(source).aval, info(node))
    ends = list(accumulate(aval.shape[dim] for aval in info(members).avals))
    args = (dim, [0, *ends][index], ends[index])
    return source, View(aten.slice.Tensor, args, {}, info(source).aval, info(node))


_SCATTERS = {  # the op that writes a slice back to the position where the view read it
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
}


def _reshaped(view: View) -> tuple[_torch.Op, Args]:
    return aten.view.default, (list(view.source.shape),)


def _unpermuted(view: View) -> tuple[_torch.Op, Args]:
    dims = [dim % view.source.ndim for dim in view.args[0]]
    return aten.permute.default, ([dims.index(dim) for dim in range(len(dims))],)


def _again(view: View) -> tuple[_torch.Op, Args]:
    return view.op, view.args


_INVERSES: dict[_torch.Op, Callable[[View], tuple[_torch.Op, Args]]] = {
    **dict.fromkeys((aten.alias.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshaped),
    **dict.fromkeys((aten.unsqueeze.default, aten.view.default, aten._unsafe_view.default), _reshaped),
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten._conj.default, aten._neg_view.default), _again),
    aten.permute.default: _unpermuted,
    aten.view_as_complex.default: lambda _: (aten.view_as_real.default, ()),
    aten.view_as_real.default: lambda _: (aten.view_as_complex.default, ()),
}
