"""Check on a trace whether an optimizer's update is elementwise, so that it commutes with sharding.

An update is elementwise under two conditions. Each new element depends only on elements at the same position and on
replicated scalars. The update computes the same expression for tensors of a shard's shape. An update that scales by the
length of a parameter violates the second condition.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import optree
import torch
from torch import fx

from sharding_specs import P, tree_paths, whole_shape

from ...functions import PyTree, SpecTree, axis_mesh
from ...ir import RESHAPES, UNIT_DIMS, Aval, Traced, info, operands_of, source_of, tensor_operands, walk_args, where
from ...ops import ADAMW
from ...optim import like_params
from ...rules import is_elementwise
from ...tracing import trace
from .returned import require_same_structure

aten = torch.ops.aten
T = TypeVar("T")

Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]

_OF_EACH_ELEMENT = {  # in addition to ops with torch's pointwise tag or an elementwise rule
    *(aten._to_copy.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default),
    *(aten.view_as_real.default, aten.view_as_complex.default, operator.getitem, ADAMW),
}
_FILLED = {  # constant tensors
    *(aten.full.default, aten.zeros.default, aten.ones.default),
    *(aten.new_full.default, aten.new_zeros.default, aten.new_ones.default),
}

_IN_ORDER = RESHAPES | UNIT_DIMS
_SHAPE_ARGUMENT = {aten.full.default: 0, aten.zeros.default: 0, aten.ones.default: 0} | dict.fromkeys(
    [*(op for op in _FILLED if "new_" in str(op)), *RESHAPES], 1
)


class Call(NamedTuple):
    """A call of an update, to be compared with another call."""

    update: Update
    args: tuple[PyTree, ...]  # only shapes and dtypes matter, so an `Aval` may replace a tensor
    names: list[Hashable]  # of the tensors in `args`; those with equal names in two calls correspond to each other


def shard_mismatch(update: Update, args: tuple[PyTree, ...], specs: tuple[SpecTree, ...]) -> str | None:
    """Explain why an update of a rank's shards differs from shards of the full update; None if it is elementwise."""
    places = iter(optree.tree_leaves(specs))
    whole = optree.tree_map(lambda leaf: _whole(leaf, next(places)), args)
    rows = zip(optree.tree_leaves(whole), optree.tree_leaves(specs), strict=True)
    labels = [(spec, tuple(leaf.shape)) if spec.axes else None for leaf, spec in rows if _is_tensor(leaf)]
    names: list[Hashable] = [*range(len(labels))]
    return update_mismatch(Call(update, whole, names), Call(update, args, names), labels, "a rank's shards")


def _whole(leaf: T, spec: P) -> T | Aval:
    return of_shape(leaf, whole_shape(leaf.shape, spec, axis_mesh())) if _is_tensor(leaf) else leaf


def layer_mismatch(update: Update, state: PyTree, stacked: PyTree, is_stack: Callable[[Any], bool]) -> str | None:
    """Explain why an update of one layer differs from that of the stack of all layers; None if it is elementwise."""
    args = (stacked, state, stacked)
    taken = like_params(args, stacked, optree.tree_map(lambda leaf: P("layers") if is_stack(leaf) else P(), stacked))
    layers = optree.tree_map(lambda leaf, spec: of_shape(leaf, leaf.shape[1:]) if spec.axes else leaf, args, taken)
    rows = zip(optree.tree_leaves(args), optree.tree_leaves(taken), strict=True)
    labels = [tuple(leaf.shape) if spec.axes else None for leaf, spec in rows if _is_tensor(leaf)]
    names: list[Hashable] = [*range(len(labels))]
    return update_mismatch(Call(update, args, names), Call(update, layers, names), labels, "one layer")


def require_promise_kept(beyond: str | None, way_out: str) -> None:
    """Raise if an optimizer has `constants`, but its update is not elementwise, as `beyond` describes."""
    if beyond is not None:
        raise ValueError(
            f"this optimizer has `constants`, which promises that its update is elementwise, and it is not: {beyond}. "
            f"On several ranks it would train otherwise than on one. {way_out}"
        )


# --- Two calls compared ---


def update_mismatch(whole: Call, parts: Call, labels: Sequence[Hashable], parts_are: str) -> str | None:
    """Explain why an update of slices differs from the slices of the update of full tensors; None if it does not.

    `labels` has a label for each tensor of `whole`, the same for equal layouts only; None for a replicated tensor.
    """
    traced = _traced(whole)
    found, further = _lying(traced, labels)
    if further is not None:
        return f"{where(further)} does not take every element of {_operands(further, found, traced, whole)} by itself"
    places = zip(traced.outputs, _as_returned(whole, traced.inputs), strict=True)
    if any(found[node] not in (found[place], _ANY) for node, place in places):
        return "it returns one parameter, or a part of its state, in the place of another"
    other, table = _traced(parts), dict[Hashable, int]()
    numbers = _numbered(traced, whole.names, table) | _numbered(other, parts.names, table)
    made = dict(zip(_as_returned(parts, parts.names), other.outputs, strict=True))
    for name, node in zip(_as_returned(whole, whole.names), traced.outputs, strict=True):
        if numbers[node] != numbers[made[name]]:
            first, second = _first_difference(node, made[name], numbers)
            mine, theirs = _shown(first, traced), _shown(second, other)
            return f"{mine} is {theirs} for {parts_are}, so it goes by a parameter's shape or name"
    return None


def _traced(call: Call) -> Traced:
    leaves, tree = optree.tree_flatten(call.args)
    tensors = [index for index, leaf in enumerate(leaves) if _is_tensor(leaf)]

    def flat(*values: torch.Tensor) -> list[Any]:
        filled = list(leaves)
        for index, value in zip(tensors, values, strict=True):
            filled[index] = value
        gradients, state, params = optree.tree_unflatten(tree, filled)
        returned = require_same_structure(call.update(gradients, state, params), params, state)
        return [leaf for leaf in optree.tree_leaves(returned) if _is_tensor(leaf)]

    given = [leaves[index] for index in tensors]
    return trace(flat, [Aval(tuple(leaf.shape), leaf.dtype, leaf.device) for leaf in given])


def _as_returned(call: Call, values: Sequence[Any]) -> list[Any]:
    """Given one value per tensor argument of `call`, return the values of its results: parameters, then state."""
    numbers = itertools.count()
    _, state, params = optree.tree_map(lambda leaf: next(numbers) if _is_tensor(leaf) else None, call.args)
    return [values[number] for number in optree.tree_leaves((params, state))]


def _is_tensor(leaf: T) -> TypeGuard[torch.Tensor | Aval]:
    return isinstance(leaf, (torch.Tensor, Aval))


def of_shape(like: torch.Tensor | Aval, shape: Sequence[int]) -> Aval:
    """Return an `Aval` with the dtype and device of `like` and another shape."""
    return Aval(tuple(shape), like.dtype, like.device)


# --- Elementwise dependence ---

_ANY = "one number everywhere"  # compatible with every layout

Place = tuple[Hashable, tuple[int, ...]] | str | None  # label and shape of a split value; None for a replicated one


def _lying(traced: Traced, labels: Sequence[Hashable]) -> tuple[dict[fx.Node, Place], fx.Node | None]:
    """Return the layout of each value, and the first op that is not elementwise, after which no layouts are computed.

    A split value has the label of an input and a shape. It may be combined only in elementwise ops, and only with
    values of equal layout, replicated scalars and numbers.
    """
    found = {node: _lies(node, label) for node, label in zip(traced.inputs, labels, strict=True)}
    for node in (node for node in traced.graph.nodes if node.op != "output"):
        operands = operands_of(node)
        split = {place for place in map(found.__getitem__, operands) if isinstance(place, tuple)}
        beside = [operand for operand in operands if found[operand] is None]
        if node.target in _FILLED:
            found[node] = _ANY
        elif split:
            if len(split) > 1 or not _takes_each(node.target) or any(map(_has_dims, beside)):
                return found, node
            ((label, _),) = split
            found[node] = _lies(node, label)
        elif node not in found:
            found[node] = _ANY if operands and not beside and _takes_each(node.target) else None
    return found, None


def _lies(node: fx.Node, label: Hashable) -> Place:
    return None if label is None else (label, info(node).result(0).shape)


def _takes_each(op: fx.node.Target) -> bool:
    return op in _OF_EACH_ELEMENT or op in _IN_ORDER or is_elementwise(op)


def _has_dims(node: fx.Node) -> bool:
    value = info(node).val
    return value is None or isinstance(value, tuple) or value.ndim > 0


def _operands(node: fx.Node, found: dict[fx.Node, Place], traced: Traced, call: Call) -> str:
    """Names, for messages, of the first two split arguments of `call` that `node` depends on."""
    leaves = zip(tree_paths(call.args), optree.tree_leaves(call.args), strict=True)
    paths = dict(zip(traced.inputs, (path for path, leaf in leaves if _is_tensor(leaf)), strict=True))
    names = []
    for operand in operands_of(node):
        while operand not in paths and found[operand] not in (None, _ANY):
            operand = next(each for each in operands_of(operand) if found[each] not in (None, _ANY))
        if operand in paths:
            names.append(_named(paths[operand]))
    return " and ".join([*dict.fromkeys(names)][:2])


def _named(path: str) -> str:
    kind, _, rest = path.partition("/")
    return {"0": "the gradient of {}", "1": "the state's {}", "2": "{}"}[kind].format(rest or "the parameter")


# --- Equality of expressions ---


def _numbered(traced: Traced, names: Sequence[Hashable], table: dict[Hashable, int]) -> dict[fx.Node, int]:
    """Number the values of a graph. In graphs of one `table`, equal ops on inputs of equal names have equal numbers."""
    keys: dict[fx.Node, Hashable] = {node: ("input", name) for node, name in zip(traced.inputs, names, strict=True)}
    for node, tensor in zip(traced.captured_inputs, traced.captured, strict=True):
        keys[node] = ("captured", id(tensor))
    numbers: dict[fx.Node, int] = {}
    for node in (node for node in traced.graph.nodes if node.op != "output"):
        if node.op == "get_attr":
            value = traced.constants[str(node.target)]
            keys[node] = ("constant", value.dtype, tuple(value.shape), str(value.tolist()))
        elif node.op == "call_function":
            keys[node] = (str(node.target), str(walk_args(_without_shape(node), lambda leaf: _text(leaf, numbers))))
        numbers[node] = table.setdefault(keys[node], len(table))
    return numbers


def _without_shape(node: fx.Node) -> tuple[Any, Any]:
    args = [arg for place, arg in enumerate(node.args) if place != _SHAPE_ARGUMENT.get(node.target)]
    return tuple(args), node.kwargs


def _text(leaf: fx.node.Argument, numbers: dict[fx.Node, int]) -> str:
    return f"%{numbers[leaf]}" if isinstance(leaf, fx.Node) else repr(leaf)


def _first_difference(mine: fx.Node, theirs: fx.Node, numbers: dict[fx.Node, int]) -> tuple[fx.Node, fx.Node]:
    """Return the earliest pair of ops that differ in the computations of two different values."""
    pairs = [(mine, theirs)]
    while pairs:
        mine, theirs = pairs.pop(0)
        if mine.target == theirs.target:
            below = zip(tensor_operands(mine), tensor_operands(theirs), strict=False)
            pairs = [(a, b) for a, b in below if numbers[a] != numbers[b] and a.op == b.op == "call_function"]
    return mine, theirs


def _shown(node: fx.Node, traced: Traced) -> str:
    """Text of an op with its operands and source line, for messages."""

    def shown(leaf: fx.node.Argument) -> fx.node.Argument:
        if isinstance(leaf, fx.Node):
            return traced.constants[str(leaf.target)].tolist() if leaf.op == "get_attr" else info(leaf).val
        return leaf

    if node.op != "call_function":
        return f"a value given to it ({shown(node)})"
    operands = ", ".join(map(str, walk_args(node.args, shown)))
    return f"{node.target}({operands}) at {source_of(node) or 'an unknown line'}"
