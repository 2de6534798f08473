"""Warn of collectives that combine equal copies of a value: legal by type, but most likely a mistake."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import fx

from ..collectives import State
from ..errors import EqualCopiesWarning
from ..ir import AxisSet, Traced, axes_of_nodes, collective_call, info, source_of, warn_at
from .typing import type_of

aten = torch.ops.aten

_FIXES = {
    "psum": "it is n times the value. If that is meant, write x * fp.axis_size({axis!r}); else drop the psum",
    "psum_scatter": "it is a slice of n times the value. To keep a slice, write fp.pscatter(x, {axis!r}, dim)",
    "pmax": "it is the value itself; drop it",
    "pmin": "it is the value itself; drop it",
}


def warn_of_equal_copies(traced: Traced, sizes: Mapping[str, int]) -> None:
    suspects = {n: call for n in traced.nodes if (call := collective_call(n, *_FIXES)) and _is_of_the_user(n)}
    if not suspects:
        return
    varied = axes_of_nodes(traced, {node: _axes_of_input(node) for node in (*traced.inputs, *traced.captured_inputs)})
    for node, call in suspects.items():
        held, differs = type_of(call.operand), varied[call.operand]
        equal = [axis for axis in call.axes if held[axis] is State.VARYING and axis not in differs]
        if equal and not _is_mean(node, prod(sizes[axis] for axis in call.axes)):
            name, axis, source = call.kind, equal[0], info(node).source
            warn_at(
                source,
                f"{source}: {name} over axis {axis!r} of a value that is equal on all ranks by construction: "
                f"{_FIXES[name].format(axis=axis)}. fp.pvary and fp.all_gather return such values; the type of "
                f"fp.all_gather(x, {axis!r}, to='invariant') tells that it is equal",
                EqualCopiesWarning,
            )


def _is_of_the_user(node: fx.Node) -> bool:
    source = source_of(node)
    return not info(node).backward and source is not None and not source.implied


def _axes_of_input(node: fx.Node) -> AxisSet:
    return frozenset(axis for axis, state in type_of(node).items() if state is not State.REDUCED)


def _is_mean(node: fx.Node, count: int) -> bool:
    divided = [user.target in (aten.div.Tensor, aten.div.Scalar) and user.args == (node, count) for user in node.users]
    return bool(divided) and all(divided)
