"""Write a program as flat Python functions: one line per op, values freed after their last use, casts as aliases."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from ... import _torch
from ...ir import Traced, differentiable_form, first_operand, in_main_memory, info, operands_of, primitive_name, where
from ..handles import arrived, to_device
from .origins import Recorded
from .pieces import FILE, HEAD, ProgramPiece, chained, cuts, function_of

aten = torch.ops.aten

_ENDS = "__ends__"  # the lines of its ops


@dataclass
class Writer:
    """`line(node, writer)` returns the right-hand side of one op; an op that it adds to `pending` returns a handle.

    `readers` maps each op that writes into its operands to the ops that must have read them before. `unfinished` has
    the results that may be returned as handles; an input of `pending` may be one.
    """

    traced: Traced
    line: Callable[[fx.Node, Writer], str]
    differentiable: bool = False
    order: Sequence[fx.Node] | None = None
    readers: Mapping[fx.Node, Sequence[fx.Node]] = field(default_factory=dict)
    record: Recorded | None = None
    recorded: bool = False
    pending: set[fx.Node] = field(default_factory=set)
    unfinished: Collection[fx.Node] = ()
    names: _PieceNames = field(init=False)  # of the values of the piece that is being written
    constants: dict[str, Any] = field(init=False)  # of this piece

    def function(self, wrap_constant: Callable[[torch.Tensor], Any] = lambda x: x) -> Callable[..., Any]:
        traced, order = self.traced, list(self.traced.nodes if self.order is None else self.order)
        names = [node for node in traced.graph.nodes if node.op == "get_attr"]
        self._wrapped = {node: wrap_constant(traced.constants[node.target]) for node in names}
        self._drops = self._last_uses(order)
        parts = [order[a:b] for a, b in itertools.pairwise(cuts([str(node.target) for node in order]))]
        self._last = {
            value: at for at, part in enumerate(parts) for node in part for value in self._drops.get(node, ())
        }
        results = [out for out in traced.outputs if isinstance(out, fx.Node) and out not in self.unfinished]
        pieces = [self._piece(at, part, () if part is not parts[-1] else results) for at, part in enumerate(parts)]
        return chained(traced.inputs, pieces, traced.outputs, self._wrapped)

    def _piece(self, number: int, nodes: Sequence[fx.Node], results: Sequence[fx.Node]) -> ProgramPiece:
        self.names, self.constants, self._made = _PieceNames(self._wrapped, self.constant), {}, dict[fx.Node, None]()
        lines: list[str] = []
        ends: list[tuple[int, fx.Node]] = []  # the number of the last line of each op
        for node in nodes:
            lines += self._waits([*operands_of(node), *self.readers.get(node, ())])
            lines.append(self._assignment(node))
            ends.append((HEAD + len(lines), node))
            dead = [self.names[value] for value in self._drops.get(node, ()) if value.op != "get_attr"]
            if dead:
                lines.append(f"del {', '.join(dead)}")
        lines += self._waits(results)
        made = [value for value in self._made if self._last.get(value) != number]
        ends_here = [value in self._made or self._last.get(value) == number for value in self.names.read]
        taken = list(itertools.compress(self.names.read, ends_here))
        kept = [value for value, is_taken in zip(self.names.read, ends_here, strict=True) if not is_taken]
        read, returned = ([self.names[value] for value in values] for values in ([*taken, *kept], made))
        return ProgramPiece(function_of(read, lines, returned, {**self.constants, _ENDS: ends}), taken, kept, made)

    def _assignment(self, node: fx.Node) -> str:
        alias = is_alias(node, self.differentiable)
        right = self.names[first_operand(node)] if alias else self.line(node, self)
        if self.record is not None and not alias:
            right = f"{self.constant(partial(self.record.note, node))}({right})"
        stops = f"with {self.constant(torch.no_grad)}(): " if _stops(node, self.differentiable) else ""
        self._made[node] = None
        return f"{stops}{self.names.new(node)} = {right}"

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

    def _waits(self, values: Sequence[fx.Node]) -> list[str]:
        late = [value for value in dict.fromkeys(values) if value in self.pending]
        self.pending.difference_update(late)
        self._made.update(dict.fromkeys(late))
        return [f"{self.names[value]} = {self._waited(value)}" for value in late]

    def _waited(self, value: fx.Node) -> str:
        name = self.names[value]
        return f"{name}.wait()" if value.op == "call_function" else f"{self.constant(arrived)}({name})"

    def _last_uses(self, order: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        kept = self.traced.returned()
        last = {operand: node for node in order for operand in operands_of(node)}
        drops: dict[fx.Node, list[fx.Node]] = {}
        for value, node in last.items():
            if value not in kept:
                drops.setdefault(node, []).append(value)
        return drops


class _PieceNames(dict[fx.Node, str]):
    """Names of the values of a piece. It reads the values from before it that are looked up."""

    def __init__(self, constants: Mapping[fx.Node, Any], write: Callable[[Any], str]) -> None:
        self._constants, self._write = constants, write
        self.read: list[fx.Node] = []

    def __missing__(self, node: fx.Node) -> str:
        if node in self._constants:
            self[node] = self._write(self._constants[node])
            return self[node]
        self.read.append(node)
        return self.new(node)

    def new(self, node: fx.Node) -> str:
        self[node] = name = f"v{len(self)}"
        return name


def failing_op(error: BaseException | None) -> str:
    """Return the op of a program that raised an error, or one that it was raised after, with its source line."""
    found = "it"
    while error is not None:
        for frame, line in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename == FILE:
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
