"""Values that a trace knows: literals, what the function closes over, and what is computed of these alone.

A trace runs on tensors without values, so `int(torch.tensor(sizes).cumsum(0)[-1])` would have none either, though no
argument takes part. Who asks for such a value gets it by computing the recorded nodes. torch's own note of a literal's
value is no help: writes in place are recorded as their functional twins, which do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..ir import Aval, Traced, getitem, hollow, info, operands_of, topological_order, walk_args
from .assumptions import assume
from .straight_through import OP as STRAIGHT_THROUGH
from .writer import Writer

__all__ = ["asks_for_values", "assume_constants", "constant_in", "fold_constants", "outside_trace", "value_of"]

aten = torch.ops.aten

_CERTAIN: dict[Any, tuple[bool, Callable[[float], bool]]] = {  # the result if the bound is low, and when it is
    aten.lt.Scalar: (False, lambda bound: bound <= 0),
    aten.le.Scalar: (False, lambda bound: bound < 0),
    aten.ge.Scalar: (True, lambda bound: bound <= 0),
    aten.gt.Scalar: (True, lambda bound: bound < 0),
}
_HOST = torch.device("cpu")
_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_OF_A_SHAPE = {  # the values of their first operand do not matter
    getattr(aten, name).default
    for name in ("ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty")
}


def asks_for_values(func: Any) -> bool:
    """Whether an op's result, or the shape of it, depends on the values of its operands."""
    return func is not aten.index.Tensor and not _ASKING.isdisjoint(func.tags)  # by numbers, or see `data_dependent`


@contextmanager
def outside_trace() -> Iterator[None]:
    """Compute on values, without any trace or transform that is under way."""
    with _torch.disable_functorch(), _torch.disable_torch_function(), torch.no_grad():
        yield


def value_of(recording: Writer, x: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, if neither an argument nor the rank takes part in them; else None.

    The program is used only as long as what the function closes over, and is read here, stays the same.
    """
    node = recording.value(x)
    if node is None and isinstance(x, _torch.FakeTensor):
        return None if recording.outer is None else value_of(recording.outer, x)
    return _evaluated(recording, recording.node_of(x) if node is None else node)


def constant_in(traced: Traced, wanted: fx.Node, known: dict[fx.Node, Any]) -> torch.Tensor | None:
    """Return the value of a node of a finished trace, on the host, if it depends on no argument and no rank.

    Args:
        traced: the graph.
        wanted: one of its nodes.
        known: the values found so far, by node, to which those found here are added.
    """
    for node in topological_order(wanted, _needed, known):
        known[node] = None
        if node.op == "get_attr":
            known[node] = _on_host(traced.constants[str(node.target)])
        elif _is_computable(node) and all(known[operand] is not None for operand in _needed(node)):
            known[node] = _computed_node(node, known, on_host=True)
    found = known[wanted]
    return found if isinstance(found, torch.Tensor) else None


def _on_host(constant: torch.Tensor) -> torch.Tensor | None:
    with outside_trace():
        return None if constant.is_meta else constant.cpu()


def assume_constants(traced: Traced, wanted: fx.Node) -> None:
    """Use the program only as long as the constants that a node is computed from stay the same."""
    seen: dict[fx.Node, None] = {}
    for node in topological_order(wanted, _needed, seen):
        seen[node] = None
        if node.op == "get_attr":
            assume(partial(_content, traced.constants[str(node.target)]))


def fold_constants(recording: Writer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an op gives for operands that are all known; NotImplemented if one is not."""
    operands = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    values: dict[int, torch.Tensor] = {}
    for x in operands:
        value = value_of(recording, x)
        if value is None:
            return NotImplemented
        values[id(x)] = value
    return _run(func, *walk_args((tuple(args), dict(kwargs)), lambda leaf: values.get(id(leaf), leaf)))


def _leaves(args: Any) -> list[Any]:
    found: list[Any] = []
    walk_args(args, found.append)
    return found


def _evaluated(recording: Writer, wanted: fx.Node) -> Any:
    values: dict[fx.Node, Any] = {}
    for node in topological_order(wanted, _needed, values):
        values[node] = None if node.op == "call_function" else _given(recording, node)
        if values[node] is None and not _is_computable(node):
            return None
    for node in values:
        if node.op == "call_function":
            values[node] = _computed_node(node, values)
    return values[wanted]


def _needed(node: fx.Node) -> Sequence[fx.Node]:
    return () if node.target in _OF_A_SHAPE or _certain(node) is not None else operands_of(node)


def _certain(node: fx.Node) -> bool | None:
    """The result of comparing a uniform draw, which is in [0, 1), with a bound that no draw or every draw passes."""
    bounds = _CERTAIN.get(node.target)
    if bounds is None or getattr(node.args[0], "target", None) is not _uniform_op():
        return None
    bound, low_holds, limit = node.args[1], bounds[0], bounds[1]
    if not isinstance(bound, (int, float)):
        return None
    if bound >= 1:
        return not low_holds
    return low_holds if limit(bound) else None


def _uniform_op() -> Any:
    return getattr(getattr(torch.ops.fp, "uniform", None), "default", None)


def _given(recording: Writer, node: fx.Node) -> torch.Tensor | None:
    """The value of a constant, or of what an enclosing trace knows."""
    traced = recording.traced
    if node.op == "get_attr":
        value = traced.constants[str(node.target)]
        if node in recording.closed_over:
            assume(partial(_content, value))
        return value
    if recording.outer is None or node not in traced.captured_inputs:
        return None
    return value_of(recording.outer, traced.captured[traced.captured_inputs.index(node)])


def _is_computable(node: fx.Node) -> bool:
    """Whether an op gives the same on all ranks; the library's own may not."""
    op = node.target
    return op in (getitem, STRAIGHT_THROUGH) or getattr(op, "namespace", None) in ("aten", "prims")


def _computed_node(node: fx.Node, values: dict[fx.Node, Any], on_host: bool = False) -> Any:
    def value(leaf: Any) -> Any:
        return values.get(leaf, leaf) if isinstance(leaf, fx.Node) else leaf

    args, kwargs = walk_args((node.args, node.kwargs), value)
    certain = _certain(node)
    if certain is not None:
        with outside_trace():
            return torch.full(info(node).aval.shape, certain, device=_HOST if on_host else info(node).aval.device)
    if node.target in _OF_A_SHAPE:
        like = info(node.args[0]).aval  # type: ignore[union-attr]
        with outside_trace():
            args = (hollow(Aval(like.shape, like.dtype, _HOST) if on_host else like), *args[1:])
    if on_host and kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": _HOST}
    return _run(node.target, args, kwargs)


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    with outside_trace():
        return op(*args, **kwargs)


def _content(x: torch.Tensor) -> bytes:
    with outside_trace():
        return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
