"""Whether an optimizer's update of shards is the shard of its update: what it computes, read off a trace.

It is where every new element depends on elements in the same place, and on what is whole on every rank, alone; and
where the update does the same to tensors of a shard's shape. One that scales by a parameter's length does not.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import fx

from sharding_specs import P, whole_shape

from ..local_function import PyTree, SpecTree, axis_mesh
from ..optim import Optimizer
from ..optim.adamw_kernel import ADAMW
from ..tracing import Aval, Traced, trace
from ..tracing.graph import operands_of, walk_args
from .updating import like_params

__all__ = ["Update", "is_elementwise", "is_of_each_layer"]

aten = torch.ops.aten

Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]

_OF_EACH_ELEMENT = {  # beside those that torch tags so
    *(aten.detach.default, aten.alias.default, aten._to_copy.default, aten.zeros_like.default, aten.ones_like.default),
    *(aten.full_like.default, aten.view_as_real.default, aten.view_as_complex.default, operator.getitem, ADAMW),
}


def is_elementwise(update: Update, args: tuple[PyTree, ...], specs: tuple[SpecTree, ...]) -> bool:
    """Whether an update does to every element of a rank's shards what it does to it in whole tensors.

    Args:
        update: (gradients, state, parameters) → (parameters, state).
        args: a rank's.
        specs: how they lie, a spec for every leaf.
    """
    leaves, places = optree.tree_leaves(args), optree.tree_leaves(specs)
    tensors = [(leaf, spec) for leaf, spec in zip(leaves, places, strict=True) if isinstance(leaf, torch.Tensor)]
    whole = [whole_shape(leaf.shape, spec, axis_mesh()) for leaf, spec in tensors]
    classes = [(spec, shape) if spec.axes else None for (_, spec), shape in zip(tensors, whole, strict=True)]
    return _does_alike(update, args, whole, [tuple(leaf.shape) for leaf, _ in tensors], classes)


def is_of_each_layer(optimizer: Optimizer, stacked: PyTree, is_stack: Callable[[Any], bool]) -> bool:
    """Whether an update does to every element of a layer what it does to it in the stack of all layers.

    Args:
        optimizer: init, and the update in question.
        stacked: parameters without memory, some of them stacks.
        is_stack: which.
    """
    args = (stacked, optimizer.init(stacked), stacked)
    taken = like_params(args, stacked, optree.tree_map(lambda leaf: P("layers") if is_stack(leaf) else P(), stacked))
    rows = zip(optree.tree_leaves(args), optree.tree_leaves(taken), strict=True)
    tensors = [(tuple(leaf.shape), bool(spec.axes)) for leaf, spec in rows if isinstance(leaf, torch.Tensor)]
    whole = [shape for shape, _ in tensors]
    parts = [shape[1:] if in_stack else shape for shape, in_stack in tensors]
    return _does_alike(
        optimizer.update, args, whole, parts, [shape if in_stack else None for shape, in_stack in tensors]
    )


def _does_alike(update: Update, args: Any, whole: list[Any], parts: list[Any], classes: list[Any]) -> bool:
    """Whether it is elementwise in whole tensors, and does the same to tensors of the parts' shapes."""
    leaves, tree = optree.tree_flatten(args)
    tensors = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def flat(*values: torch.Tensor) -> list[Any]:
        filled = list(leaves)
        for index, value in zip(tensors, values, strict=True):
            filled[index] = value
        return optree.tree_leaves(update(*optree.tree_unflatten(tree, filled)))

    def of(shapes: Sequence[tuple[int, ...]]) -> Traced:
        kinds = [(leaves[index].dtype, leaves[index].device) for index in tensors]
        return trace(flat, [Aval(shape, *kind) for shape, kind in zip(shapes, kinds, strict=True)])

    traced = of(whole)
    return _is_of_each_element(traced, classes) and _written(traced) == _written(of(parts))


def _is_of_each_element(traced: Traced, classes: Sequence[Any]) -> bool:
    """Whether what is split meets only its like, in ops that take every element by itself.

    Args:
        traced: the update of whole tensors.
        classes: of each input, what tells those apart that lie differently; None for what is whole on every rank.
    """
    found: dict[fx.Node, Any] = dict(zip(traced.inputs, classes, strict=True))
    for node in traced.nodes:
        operands = operands_of(node)
        split = {found[operand] for operand in operands if found.get(operand) is not None}
        found[node] = next(iter(split), None)
        beside = [operand for operand in operands if found.get(operand) is None]
        if split and (len(split) > 1 or not _takes_each(node.target) or any(map(_has_dims, beside))):
            return False
    return True


def _takes_each(op: Any) -> bool:
    return op in _OF_EACH_ELEMENT or torch.Tag.pointwise in getattr(op, "tags", ())


def _has_dims(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is None or isinstance(value, tuple) or value.ndim > 0


def _written(traced: Traced) -> list[Any]:
    """A graph as text that two of the same ops share, whatever the shapes of their tensors."""
    number = {node: index for index, node in enumerate(traced.graph.nodes)}
    name = lambda leaf: f"%{number[leaf]}" if isinstance(leaf, fx.Node) else repr(leaf)  # noqa: E731
    ops = [(str(node.target), walk_args((node.args, node.kwargs), name)) for node in traced.nodes]
    return [*ops, *map(name, traced.outputs)]
