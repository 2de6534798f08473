"""Calling the op of a traced node again, with its derivative.

A raw library op carries none, so gradients through it would silently be zero: each collective is called as the
differentiable primitive it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from . import _torch
from .collectives import emit
from .source import inherit
from .tracing import Traced, source_of
from .tracing.graph import walk_args

__all__ = ["casts_are_explicit", "differentiable", "emit_node", "explicit_casts", "interpret"]

ops = torch.ops.fp
_DIFFERENTIABLE: dict[Any, Any] = {}


def differentiable(op: Any, function: Any) -> None:
    """Say which function stands for a library op when a graph is run again."""
    _DIFFERENTIABLE[op] = function


def emit_node(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one op of a graph on actual values."""
    function = _DIFFERENTIABLE.get(target)
    if function is not None:
        return function(*args, **kwargs)
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "fp":
        if target is ops.axis_index.default:
            return target(*args)
        x, axes, *params = args
        return emit(target._schema.name.split("::")[1], x, axes, *params)
    return _torch.stride_free(target)(*args, **kwargs)


_explicit: list[bool] = [False]


@contextmanager
def explicit_casts() -> Iterator[None]:
    """What runs inside writes its casts itself, so no torch.func derivative of it can miss one."""
    _explicit.append(True)
    try:
        yield
    finally:
        _explicit.pop()


def casts_are_explicit() -> bool:
    return _explicit[-1]


def interpret(traced: Traced, inputs: list[Any]) -> list[Any]:
    """Run a graph on actual values, op by op, differentiably.

    Args:
        traced: the graph.
        inputs: a value for each of its inputs; captured tensors are the graph's own.
    """
    values: dict[fx.Node, Any] = dict(zip(traced.inputs, inputs, strict=True))
    values.update(zip(traced.captured_inputs, traced.captured, strict=True))
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            values[node] = traced.constants[node.target]
        elif node.op == "call_function":
            args, kwargs = walk_args((node.args, node.kwargs), lambda a: values[a] if isinstance(a, fx.Node) else a)
            with inherit(source_of(node)):
                result = emit_node(node.target, args, kwargs)
            values[node] = result.detach() if node.meta["no_grad"] and isinstance(result, torch.Tensor) else result
    return [values[output] if isinstance(output, fx.Node) else output for output in traced.outputs]
