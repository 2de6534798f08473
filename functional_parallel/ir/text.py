"""Text of a program, with one line per op: `h3: f32[8, 16]{V:data} = psum(h2, 'tensor')  # model.py:12`."""

from __future__ import annotations

import difflib

import torch
from torch import fx
from torch.fx.node import Argument

from sharding_specs import Mesh

from ..collectives import Type
from .checksums import contents
from .graph import Traced, primitive_name
from .info import info

_COLUMN = 88


def program_text(traced: Traced, mesh: Mesh, in_names: list[str], out_names: list[str], *, sources: bool = True) -> str:
    """Return the readable text of a program. The mesh has the order of the axes in types."""
    names = _names(traced)
    lines: list[tuple[str, str]] = []

    def add(node: fx.Node, right: str, comment: str = "") -> None:
        lines.append((f"{names[node]}: {_type(node, mesh)} = {right}", comment))

    for node, name in zip(traced.inputs, in_names, strict=True):
        add(node, f"input {name}")
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            add(node, f"constant {contents(traced.constants[node.target])}", _comment(node))
        elif node.op == "call_function":
            add(node, _call(node, names), _comment(node))
    for output, name in zip(traced.outputs, out_names, strict=True):
        lines.append((f"return {name} = {names[output] if isinstance(output, fx.Node) else repr(output)}", ""))
    return "\n".join(_beside(lines) if sources else [line for line, _ in lines])


def canonical_lines(traced: Traced, mesh: Mesh, in_names: list[str], out_names: list[str]) -> list[str]:
    """Return the lines of `program_text` without source lines. Two programs are equal exactly if these lines are."""
    return program_text(traced, mesh, in_names, out_names, sources=False).splitlines()


def first_difference(mine: list[str], other: list[str]) -> str:
    """Return the first lines where two programs differ, found by a diff. Empty if they are equal.

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


def _type(node: fx.Node, mesh: Mesh) -> str:
    value, type_ = info(node).val, info(node).type
    text = "(" + ", ".join(map(str, value)) + ")" if isinstance(value, tuple) else str(value)
    if not type_:
        return text
    axes = sorted(type_, key=lambda axis: mesh.axis_names.index(axis) if axis in mesh.axis_names else mesh.size)
    return f"{text}{Type({axis: type_[axis] for axis in axes})}"


def _comment(node: fx.Node) -> str:
    source = info(node).source
    return f"# {source}{' backward' if info(node).backward else ''}" if source else ""


def _beside(lines: list[tuple[str, str]]) -> list[str]:
    column = max((len(line) for line, comment in lines if comment and len(line) <= _COLUMN), default=0)
    return [f"{line:<{column}}  {comment}".rstrip() for line, comment in lines]


def _call(node: fx.Node, names: dict[fx.Node, str]) -> str:
    parts = [_argument(arg, names) for arg in node.args]
    parts += [f"{key}={_argument(value, names)}" for key, value in node.kwargs.items()]
    return f"{_target(node)}({', '.join(parts)})"


def _argument(value: Argument, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, torch.device):
        return value.type  # every rank has a different index
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument(each, names) for each in value)}]"
    return repr(value)


def _target(node: fx.Node) -> str:
    name = primitive_name(node)
    if name is not None:
        return name
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removeprefix("aten.").removesuffix(".default")
    return getattr(target, "__name__", str(target))
