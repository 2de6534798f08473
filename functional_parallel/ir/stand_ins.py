"""Functions that stand for library ops, since a library op has no derivative under torch.func.

A trace records the op. Whoever runs the graph where a derivative may be taken calls the function, and gets the op with
its derivative: a torch.autograd.Function, or for an op that is there for speed its formula in torch's own ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["differentiable_form", "register_differentiable"]

_functions: dict[Any, Callable[..., Any]] = {}


def register_differentiable(op: Any, function: Callable[..., Any]) -> None:
    """Say which function stands for a library op where a derivative may be taken."""
    _functions[op] = function


def differentiable_form(op: Any) -> Callable[..., Any] | None:
    """The function that stands for an op, if one was named."""
    return _functions.get(op)
