"""Call of a collective, with names for its arguments. This module alone knows their positions.

A field with a text as its default is an attribute. Every library op has it as a keyword argument, and passes set it. An
attribute changes how a value is sent, but not its type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import torch

STARTED = frozenset({"psum", "psum_scatter", "all_gather", "all_to_all"})  # runtimes start them early, and wait late
OWNED = ("broadcast", "scatter", "gather", "reduce")  # to or from a value that a single rank holds
COMMUNICATING = frozenset({*STARTED, "ppermute", "pmax", "pmin", "pbroadcast", *OWNED})

_STATES = ("src", "dst")
_DIMS = ("dim", "split_dim", "concat_dim")


@dataclass(frozen=True)
class CollectiveCall:
    """Call of a primitive. The fields after `axes` are the arguments of library ops; None if an op lacks it."""

    kind: str
    operand: Any  # None for `axis_index`
    axes: tuple[str, ...]
    dim: int | None = None
    split_dim: int | None = None
    concat_dim: int | None = None
    pairs: Sequence[int] | None = None
    source: int | None = None
    owner: int | None = None
    src: str | None = None  # state of the operand
    dst: str | None = None  # state of the result
    wire: str = ""  # format of the sent values, such as "int8/64"

    @property
    def target(self) -> torch._ops.OpOverload:
        op: torch._ops.OpOverload = getattr(torch.ops.fp, self.kind).default
        return op

    @property
    def args(self) -> tuple[Any, ...]:
        axes = list(self.axes)
        return (axes,) if self.kind == "axis_index" else (self.operand, axes, *self.params)

    @property
    def params(self) -> tuple[Any, ...]:
        """Arguments of `apply_primitive` after the axes."""
        return tuple(getattr(self, name) for name in _parameters(self.kind))

    @property
    def kwargs(self) -> dict[str, str]:
        return {name: value for name in attributes() if (value := getattr(self, name))}

    @property
    def states(self) -> dict[str, str]:
        return {name: value for name in _STATES if (value := getattr(self, name)) is not None}

    @property
    def routing(self) -> dict[str, Any]:
        """Arguments that decide which values each rank gets: dims, ranks and pairs of ranks."""
        return {name: getattr(self, name) for name in _parameters(self.kind) if name not in _STATES}

    @property
    def dims(self) -> tuple[int, ...]:
        """Dims of the operand that the call splits or joins."""
        return tuple(dim for name in _DIMS if (dim := getattr(self, name)) is not None)

    def with_dims(self, change: Callable[[int], int]) -> CollectiveCall:
        changed: dict[str, Any] = {n: change(dim) for n in _DIMS if (dim := getattr(self, n)) is not None}
        return replace(self, **changed)


@lru_cache
def attributes() -> dict[str, str]:
    return {each.name: each.default for each in fields(CollectiveCall) if isinstance(each.default, str)}


@lru_cache
def _parameters(kind: str) -> tuple[str, ...]:
    arguments = getattr(torch.ops.fp, kind).default._schema.arguments
    return tuple(each.name for each in arguments if each.name not in ("x", "axes", *attributes()))


def call_of(kind: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> CollectiveCall:
    operand, axes, *params = (None, *args) if kind == "axis_index" else args
    named = dict(zip(_parameters(kind), params, strict=False))
    return CollectiveCall(kind, operand, tuple(axes), **named, **(kwargs or {}))
