"""Functions that stand for library ops, since a library op has no derivative under torch.func.

A trace records the op. Whoever runs the graph again calls the function, and gets the op with its derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["differentiable", "formula", "formula_of", "stand_in"]

_functions: dict[Any, Callable[..., Any]] = {}
_formulas: dict[Any, Callable[..., Any]] = {}


def differentiable(op: Any, function: Callable[..., Any]) -> None:
    """Say which function stands for a library op when a graph is run again."""
    _functions[op] = function


def stand_in(op: Any) -> Callable[..., Any] | None:
    """The function that stands for an op, if one was named."""
    return _functions.get(op)


def formula(op: Any, function: Callable[..., Any]) -> None:
    """Say what a library op computes, in torch's own ops, for where a derivative is taken of it.

    The op itself is for speed: it has none, and writes where its operands lie.
    """
    _formulas[op] = function


def formula_of(op: Any) -> Callable[..., Any] | None:
    """The formula of an op, if it has one."""
    return _formulas.get(op)
