"""Bind keyword arguments to positions. Layouts identify an argument by its position only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["bind_positional", "call_signature", "copy_signature"]

_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def call_signature(f: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function. None if it has none, as some functions written in C."""
    try:
        return inspect.signature(f)
    except (TypeError, ValueError):
        return None


def copy_signature(f: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    made.__signature__ = call_signature(f)  # type: ignore[attr-defined]
    return made


def bind_positional(
    signature: inspect.Signature | None, name: str, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return all arguments by position. Omitted arguments before the last passed one get their defaults.

    >>> bind_positional(call_signature(lambda params, x, mask=None, scale=1.0: None), "loss", (0, 1), {"scale": 2.0})
    (0, 1, None, 2.0)
    """
    if not named:
        return args
    if signature is None:
        raise TypeError(f"{name} does not say what its arguments are called: give {_listed(named)} by place")
    try:
        given = signature.bind(*args, **named).arguments
    except TypeError as error:
        raise TypeError(f"{name}{signature}: {error}") from None
    places = [parameter for parameter in signature.parameters.values() if parameter.kind in _PLACED]
    if unplaced := named.keys() - {parameter.name for parameter in places}:
        raise TypeError(
            f"{name}{signature} has no place for {_listed(sorted(unplaced))}, and specs go by place: let it take "
            "them by place, or bind what is the same in every call by functools.partial"
        )
    last = max(index for index, parameter in enumerate(places) if parameter.name in given)
    return tuple(given.get(parameter.name, parameter.default) for parameter in places[: last + 1])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
