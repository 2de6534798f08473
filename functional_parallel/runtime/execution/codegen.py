"""Write a program as one flat Python function: one line per op, values freed after their last use, casts as aliases."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from ... import _torch
from ...ir import Traced, differentiable_form, first_operand, in_main_memory, info, operands_of, primitive_name, where
from ..handles import to_device
from .origins import Recorded

aten = torch.ops.aten

_FILE, _ENDS = "<program>", "__ends__"  # of the function, and the lines of its ops


@dataclass
class Writer:
    """`line(node, writer)` returns the right-hand side of one op; an op that it adds to `pending` returns a handle.

    `readers` maps each op that writes into its operands to the ops that must have read them before.
    """

    traced: Traced
    line: Callable[[fx.Node, Writer], str]
    differentiable: bool = False
    order: Sequence[fx.Node] | None = None
    readers: Mapping[fx.Node, Sequence[fx.Node]] = field(default_factory=dict)
    record: Recorded | None = None
    recorded: bool = False
    pending: set[fx.Node] = field(default_factory=set)
    names: dict[fx.Node, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)

    def function(self, wrap_constant: Callable[[torch.Tensor], Any] = lambda x: x) -> Callable[..., Any]:
        lines = [f"{self._name(node)} = inputs[{index}]" for index, node in enumerate(self.traced.inputs)]
        lines.append("inputs.clear()")
        ends: list[tuple[int, fx.Node]] = []  # the number of the last line of each op
        for node in self.traced.graph.nodes:
            if node.op == "get_attr":
                self.names[node] = self.constant(wrap_constant(self.traced.constants[node.target]))
        order = list(self.traced.nodes if self.order is None else self.order)
        drops = self._last_uses(order)
        for node in order:
            lines += self._waits([*operands_of(node), *self.readers.get(node, ())])
            alias = is_alias(node, self.differentiable)
            right = self.names[first_operand(node)] if alias else self.line(node, self)
            if self.record is not None and not alias:
                right = f"{self.constant(partial(self.record.note, node))}({right})"
            stops = f"with {self.constant(torch.no_grad)}(): " if _stops(node, self.differentiable) else ""
            lines.append(f"{stops}{self._name(node)} = {right}")
            ends.append((len(lines) + 1, node))
            dead = [self.names[value] for value in drops.get(node, ()) if value.op != "get_attr"]
            if dead:
                lines.append(f"del {', '.join(dead)}")
        lines += self._waits([out for out in self.traced.outputs if isinstance(out, fx.Node)])
        outputs = ", ".join(self.names[out] if isinstance(out, fx.Node) else repr(out) for out in self.traced.outputs)
        source = "def run(inputs):\n    " + "\n    ".join([*lines, f"return [{outputs}]"])
        scope = {**self.constants, _ENDS: ends}
        exec(compile(source, _FILE, "exec"), scope)
        result: Callable[..., Any] = scope["run"]
        return result

    def constant(self, value: Any) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = value
        return name

    def op(self, target: fx.node.Target) -> str:
        if self.differentiable:
            return self.constant(differentiable_form(target) or _torch.under_transforms(target))
        return self.constant(_torch.direct_call(_torch.stride_free(target)))

    def argument(self, value: fx.node.Argument, node_text: Callable[[fx.Node], str]) -> str:
        if isinstance(value, fx.Node):
            return node_text(value)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(self.argument(part, node_text) for part in value)
            return f"[{inner}]"
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self.constant(value)

    def call(self, node: fx.Node, node_text: Callable[[fx.Node], str]) -> str:
        if not self.differentiable and is_moved_to_device(node):
            return self._moved(node, node_text)
        parts = [self.argument(arg, node_text) for arg in node.args]
        parts += [f"{key}={self.argument(value, node_text)}" for key, value in node.kwargs.items()]
        return f"{self.op(node.target)}({', '.join(parts)})"

    def _moved(self, node: fx.Node, node_text: Callable[[fx.Node], str]) -> str:
        (source, *_), aval = node.args, info(node).aval
        placed = partial(_placed, dtype=aval.dtype, device=aval.device)
        if self.recorded and source.op == "get_attr":
            return f"{self.constant(placed(self.traced.constants[source.target]))}.clone()"
        return f"{self.constant(placed)}({node_text(source)})"

    def _name(self, node: fx.Node) -> str:
        return self.names.setdefault(node, f"v{len(self.names)}")

    def _waits(self, values: Sequence[fx.Node]) -> list[str]:
        late = [value for value in dict.fromkeys(values) if value in self.pending]
        self.pending.difference_update(late)
        return [f"{self.names[value]} = {self.names[value]}.wait()" for value in late]

    def _last_uses(self, order: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        kept = {output for output in self.traced.outputs if isinstance(output, fx.Node)}
        last = {operand: node for node in order for operand in operands_of(node)}
        drops: dict[fx.Node, list[fx.Node]] = {}
        for value, node in last.items():
            if value not in kept:
                drops.setdefault(node, []).append(value)
        return drops


def failing_op(error: BaseException | None) -> str:
    """Return the op of a program that raised an error, or one that it was raised after, with its source line."""
    found = "it"
    while error is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == _FILE:
                found = next((where(node) for end, node in frame.f_globals[_ENDS] if line <= end), found)
        error = error.__context__
    return found


def is_alias(node: fx.Node, differentiable: bool) -> bool:
    """Whether the op's result is its operand: casts that no derivative stops at, and detach without derivatives."""
    if node.target is aten.detach.default:
        return not differentiable
    return primitive_name(node) == "pcast" and not _stops(node, differentiable)


def is_moved_to_device(node: fx.Node) -> bool:
    if node.target is not aten._to_copy.default or not isinstance(node.args[0], fx.Node):
        return False
    return in_main_memory(info(node.args[0]).aval) and not in_main_memory(info(node).aval)


def _placed(x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return to_device(x.to(dtype), device)


def _stops(node: fx.Node, differentiable: bool) -> bool:
    return differentiable and bool(info(node).no_grad)
