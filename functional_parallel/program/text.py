"""A program as text: one line per op, `h3: f32[8, 16]{V:data} = psum(h2, 'tensor')  # model.py:12`."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from torch import fx

from ..tracing import Aval, Traced
from ..tracing.graph import walk_args
from .collectives import primitive_name

__all__ = ["canonical_lines", "first_difference", "program_text"]


class _Name(str):
    """A name that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def program_text(traced: Traced, in_names: list[str], out_names: list[str], *, sources: bool = True) -> str:
    """The program, readable.

    Args:
        traced: its graph.
        in_names, out_names: what to call inputs and results.
        sources: whether lines end in the source line.
    """
    names = _names(traced)
    lines = [
        f"{names[node]}{_aval(node)} = input {name!r}" for node, name in zip(traced.inputs, in_names, strict=True)
    ]
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            lines.append(f"{names[node]}{_aval(node)} = constant")
        elif node.op == "call_function":
            source = node.meta.get("source")
            tail = f"  # {source}{' backward' if node.meta['backward'] else ''}" if sources and source else ""
            lines.append(f"{names[node]}{_aval(node)} = {_call(node, names)}{tail}")
    for output, name in zip(traced.outputs, out_names, strict=True):
        value = names[output] if isinstance(output, fx.Node) else repr(output)
        lines.append(f"return {name!r} = {value}")
    return "\n".join(lines)


def canonical_lines(traced: Traced, in_names: list[str], out_names: list[str]) -> list[str]:
    """The same without source lines: equal for two programs exactly when they do the same."""
    return program_text(traced, in_names, out_names, sources=False).splitlines()


def first_difference(mine: list[str], other: list[str]) -> str:
    """The first lines in which two programs differ, as a person compares them; empty when they are equal.

    >>> print(first_difference(["a = 1", "b = psum(a)"], ["a = 1", "b = all_gather(a)"]))
    line 2:
      here:  b = psum(a)
      there: b = all_gather(a)
    """
    for tag, a, _, b, _ in difflib.SequenceMatcher(None, mine, other, autojunk=False).get_opcodes():
        if tag != "equal":
            here = mine[a] if a < len(mine) else "(the program ends)"
            there = other[b] if b < len(other) else "(the program ends)"
            return f"line {a + 1}:\n  here:  {here}\n  there: {there}"
    return ""


def _names(traced: Traced) -> dict[fx.Node, str]:
    names: dict[fx.Node, str] = {}
    counts = {"placeholder": 0, "get_attr": 0, "call_function": 0}
    letters = {"placeholder": "x", "get_attr": "c", "call_function": "h"}
    for node in traced.graph.nodes:
        if node.op in letters:
            names[node] = f"{letters[node.op]}{counts[node.op]}"
            counts[node.op] += 1
    return names


def _aval(node: fx.Node) -> str:
    value = node.meta["val"]
    type_ = node.meta.get("type")
    text = str(value) if isinstance(value, Aval) else "(" + ", ".join(map(str, value)) + ")"
    return f": {text}{type_ if type_ else ''}"


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    args, kwargs = walk_args((node.args, node.kwargs), lambda a: _Name(names[a]) if isinstance(a, fx.Node) else a)
    parts = [_argument(arg) for arg in args] + [f"{key}={_argument(value)}" for key, value in kwargs.items()]
    return f"{_target(node)}({', '.join(parts)})"


def _argument(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(_argument, value))
        return f"[{inner}]"
    return repr(value)


def _target(node: fx.Node) -> str:
    name = primitive_name(node)
    if name is not None:
        return name
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removeprefix("aten.").removesuffix(".default")
    return getattr(target, "__name__", str(target))
