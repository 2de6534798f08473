"""Functions that stand for library ops, since a library op has no derivative under torch.func.

A trace records the op. Whoever runs the graph again calls the function, and gets the op with its derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["differentiable", "stand_in"]

_functions: dict[Any, Callable[..., Any]] = {}


def differentiable(op: Any, function: Callable[..., Any]) -> None:
    """Say which function stands for a library op when a graph is run again."""
    _functions[op] = function


def stand_in(op: Any) -> Callable[..., Any] | None:
    """The function that stands for an op, if one was named."""
    return _functions.get(op)
