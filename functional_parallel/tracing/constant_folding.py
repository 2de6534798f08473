"""Values that a trace knows: literals, closed-over tensors, and values computed only from these.

A trace runs on tensors without values, so `int(torch.tensor(sizes).cumsum(0)[-1])` would not have a value either,
although it does not depend on any argument. If code reads such a value, it is computed from the recorded nodes. The
value that torch stores in the fake tensor of a literal cannot be used: in-place ops are recorded as their functional
variants, which do not change it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import NotImplementedType
from typing import Any

import optree
import torch
from torch import fx
from torch.fx.node import Argument, Target

from .. import _torch
from ..ir import (
    OPS_ON_SHAPES,
    Args,
    Aval,
    Kwargs,
    Traced,
    getitem,
    hollow,
    info,
    operands_of,
    topological_order,
    walk_args,
)
from .assumptions import assume
from .straight_through import OP as STRAIGHT_THROUGH
from .writer import TraceWriter

aten = torch.ops.aten

_COMPARISONS: dict[Target, Callable[[float, float], bool]] = {
    aten.lt.Scalar: operator.lt,
    aten.le.Scalar: operator.le,
    aten.ge.Scalar: operator.ge,
    aten.gt.Scalar: operator.gt,
}
_HOST = torch.device("cpu")
_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def asks_for_values(func: _torch.Op) -> bool:
    """Whether the result of an op, or the shape of the result, depends on the values of its operands."""
    # `index` is called with integer indices here; `data_dependent` handles masks
    return func is not aten.index.Tensor and not _ASKING.isdisjoint(func.tags)


@contextmanager
def outside_trace() -> Iterator[None]:
    with _torch.disable_functorch(), _torch.disable_torch_function(), torch.no_grad():
        yield


def value_of(recording: TraceWriter, x: torch.Tensor) -> torch.Tensor | None:
    """Return the values of a tensor, if they depend neither on an argument nor on the rank; else None.

    The program is used only while the closed-over tensors that are read here stay the same.
    """
    recording.values_read += 1
    node = recording.value(x)
    if node is None and isinstance(x, _torch.FakeTensor):
        return None if recording.outer is None else value_of(recording.outer, x)
    return _evaluated(recording, recording.node_of(x) if node is None else node)


def constant_in(traced: Traced, wanted: fx.Node, known: dict[fx.Node, Any]) -> torch.Tensor | None:
    """Return the value of a node of a finished trace, on the host. None if it depends on an argument or the rank.

    `known` contains the values found so far. Values found here are added to it.
    """
    for node in topological_order(wanted, _needed, known):
        known[node] = None
        if node.op == "get_attr":
            constant = traced.constants[str(node.target)]
            with outside_trace():
                known[node] = None if constant.is_meta else constant.cpu()
        elif _is_computable(node) and all(known[operand] is not None for operand in _needed(node)):
            known[node] = _computed_node(node, known, on_host=True)
    found = known[wanted]
    return found if isinstance(found, torch.Tensor) else None


def assume_constants(traced: Traced, wanted: fx.Node) -> None:
    """Allow the program to be used only while the constants that a node depends on stay the same."""
    seen: dict[fx.Node, None] = {}
    for node in topological_order(wanted, _needed, seen):
        seen[node] = None
        if node.op == "get_attr":
            assume(partial(content, traced.constants[str(node.target)]))


def fold_constants(
    recording: TraceWriter, func: _torch.Op, args: Args, kwargs: Kwargs
) -> Argument | NotImplementedType:
    """Return the result of an op with known operands. NotImplemented if an operand is not known."""
    values: dict[int, torch.Tensor] = {}
    for x in filter(torch.is_tensor, optree.tree_leaves((args, kwargs))):
        value = value_of(recording, x)
        if value is None:
            return NotImplemented
        values[id(x)] = value
    own_args, own_kwargs = walk_args((tuple(args), dict(kwargs)), lambda leaf: values.get(id(leaf), leaf))
    with outside_trace():
        return func(*own_args, **own_kwargs)


def _evaluated(recording: TraceWriter, wanted: fx.Node) -> torch.Tensor | None:
    values: dict[fx.Node, Any] = {}
    for node in topological_order(wanted, _needed, values):
        values[node] = None if node.op == "call_function" else _given(recording, node)
        if values[node] is None and not _is_computable(node):
            return None
    for node in values:
        if node.op == "call_function":
            values[node] = _computed_node(node, values)
    found: torch.Tensor | None = values[wanted]
    return found


def _needed(node: fx.Node) -> Sequence[fx.Node]:
    return () if node.target in OPS_ON_SHAPES or _certain(node) is not None else operands_of(node)


def _certain(node: fx.Node) -> bool | None:
    compare = _COMPARISONS.get(node.target)
    if (
        compare is None
        or str(node.args[0].target) != "fp.uniform.default"
        or not isinstance(node.args[1], (int, float))
    ):
        return None
    low, high = compare(0.0, node.args[1]), compare(math.nextafter(1.0, 0.0), node.args[1])
    return low if low == high else None


def draws(node: fx.Node) -> bool:
    return str(node.target) in ("fp.uniform.default", "fp.kept.default")


def _given(recording: TraceWriter, node: fx.Node) -> torch.Tensor | None:
    traced = recording.traced
    if node.op == "get_attr":
        value = traced.constants[str(node.target)]
        if value.is_meta:
            return None
        if node in recording.closed_over:
            assume(partial(content, value))
        return value
    if recording.outer is None or node not in traced.captured_inputs:
        return None
    return value_of(recording.outer, traced.captured[traced.captured_inputs.index(node)])


def _is_computable(node: fx.Node) -> bool:
    op = node.target
    return op in (getitem, STRAIGHT_THROUGH) or getattr(op, "namespace", None) in ("aten", "prims")


def _computed_node(node: fx.Node, values: dict[fx.Node, Any], on_host: bool = False) -> Argument:
    def value(leaf: Argument) -> Argument:
        return values.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf

    args, kwargs = walk_args((node.args, node.kwargs), value)
    certain, known = _certain(node), info(node).val
    on_host = on_host or (isinstance(known, Aval) and _torch.is_missing(known.device.type))
    with outside_trace():
        if certain is not None:
            return torch.full(info(node).aval.shape, certain, device=_HOST if on_host else info(node).aval.device)
        if node.target in OPS_ON_SHAPES:
            like = info(node.args[0]).aval
            args = (hollow(Aval(like.shape, like.dtype, _HOST) if on_host else like), *args[1:])
        if on_host and kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _HOST}
        return node.target(*args, **kwargs)


def content(x: torch.Tensor) -> bytes:
    with outside_trace():
        return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
