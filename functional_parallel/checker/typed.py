"""Run a typed graph with its implied casts made explicit, so that its derivative has the right collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import Argument

from ..collectives import State, apply_primitive, call_of
from ..ir import (
    Args,
    Traced,
    at_source,
    collective_call,
    eval_node,
    explicit_casts,
    grad_mode_of,
    implied_source,
    info,
    is_trained,
    source_of,
    tensor_operands,
    walk_args,
)
from ..tracing import stand_in
from .typing import casts_of, type_of


def run_typed(traced: Traced, inputs: Sequence[Any]) -> list[Any]:
    """Run a typed graph with its implied casts. `inputs` are the inputs and captured tensors."""
    run = _TypedInterpreter()
    run.values.update(zip([*traced.inputs, *traced.captured_inputs], inputs, strict=True))
    with explicit_casts():
        for node in traced.graph.nodes:
            if node.op == "get_attr":
                run.values[node] = stand_in(traced.constants[node.target], info(node).aval.device)
            elif node.op == "call_function":
                with at_source(implied_source(node) if info(node).backward else source_of(node)):
                    run.values[node] = run.compute(node)
    return [run.values[out] if isinstance(out, fx.Node) else out for out in traced.outputs]


class _TypedInterpreter:
    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.casts: dict[tuple[Any, ...], Any] = {}

    def compute(self, node: fx.Node) -> Argument:
        wanted: dict[int, list[tuple[str, State, State]]] = {}
        if not _names_axes(node):
            for index, axis, source, target in casts_of(node):
                wanted.setdefault(index, []).append((axis, source, target))
        position = iter(range(len(tensor_operands(node))))

        def visit(leaf: Argument) -> Argument:
            if not isinstance(leaf, fx.Node):
                return leaf
            return self._cast(leaf, wanted.get(next(position), []))

        args, kwargs = walk_args((node.args, node.kwargs), visit)
        with grad_mode_of(node):
            return eval_node(node.target, _resolved(node, args), kwargs)

    def _cast(self, node: fx.Node, casts: list[tuple[str, State, State]]) -> Argument:
        value = self.values[node]
        done: tuple[tuple[str, State, State], ...] = ()
        if not is_trained(value):
            return value
        for cast in casts:
            done = (*done, cast)
            key = (node, done)
            if key not in self.casts:
                self.casts[key] = apply_primitive("pcast", value, (cast[0],), cast[1].value, cast[2].value)
            value = self.casts[key]
        return value


def _names_axes(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace == "fp"
        and "axes" in {argument.name for argument in node.target._schema.arguments}
    )


def _resolved(node: fx.Node, args: Args) -> Args:
    call = collective_call(node)
    if call is None or "auto" not in call.states.values():
        return args
    states = {type_of(call.operand)[axis] for axis in call.axes}
    state = next(iter(states)).value if len(states) == 1 else "varying"
    return replace(call_of(call.kind, args), src=state).args
