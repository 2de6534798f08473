"""Library ops and their differentiable forms. A library op does not have a derivative under torch.func.

A trace records the op. A run of the graph that may be differentiated calls the differentiable form instead. This is a
torch.autograd.Function that calls the op. For an op that exists only for speed, it is the formula in torch's own ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import Target

_library = torch.library.Library("fp", "FRAGMENT")
_functions: dict[Target, Callable[..., Any]] = {}
_origins: dict[Target, Target] = {}
_APART: set[Target] = set()  # ops: no call of them replaces another call


def define_op(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    form: Callable[..., Any],
    *tags: torch.Tag,
    merges: bool = True,
) -> Any:
    """Define a library op and return it. `fake` returns tensors of its shapes; `form` is its differentiable form.

    If it `merges`, two calls on equal arguments may become one.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp::{name}", fake, lib=_library)
    op = getattr(torch.ops.fp, name).default
    register_differentiable(op, form)
    if not merges:
        _APART.add(op)
    return op


def stays_apart(op: Target) -> bool:
    return op in _APART


def register_differentiable(op: Target, function: Callable[..., Any]) -> None:
    """Register the function that replaces a library op where a derivative may be taken."""
    _functions[op] = function


def differentiable_form(op: Target) -> Callable[..., Any] | None:
    return _functions.get(origin_of(op)) or _functions.get(op)


def declare_origin(op: Target, origin: Target, function: Callable[..., Any]) -> None:
    """Declare that `op` replaces `origin` in a trace, with this differentiable form unless `origin` has one."""
    _origins[op], _functions[op] = origin, function


def origin_of(op: Target) -> Target:
    """Return the op that this op replaces in a trace, under which a user registers rules; else `op`."""
    return _origins.get(op, op)
