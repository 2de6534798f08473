"""Differentiable forms of library ops. A library op does not have a derivative under torch.func.

A trace records the op. A run of the graph that may be differentiated calls the differentiable form instead. This is a
torch.autograd.Function that calls the op. For an op that exists only for speed, it is the formula in torch's own ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx.node import Target

__all__ = ["differentiable_form", "register_differentiable"]

_functions: dict[Target, Callable[..., Any]] = {}


def register_differentiable(op: Target, function: Callable[..., Any]) -> None:
    """Register the function that replaces a library op where a derivative may be taken."""
    _functions[op] = function


def differentiable_form(op: Target) -> Callable[..., Any] | None:
    """Return the differentiable form of an op, or None if it has none registered."""
    return _functions.get(op)
