"""A value that carries its spec, until `split` separates them."""

from __future__ import annotations

from typing import Any

from .spec import P

__all__ = ["Annotated"]


class Annotated:
    """A value with its spec: a leaf of a pytree until `split` takes them apart."""

    __slots__ = ("spec", "value")

    def __init__(self, value: Any, spec: P) -> None:
        self.value, self.spec = value, spec

    def __repr__(self) -> str:
        return f"Annotated(shape={tuple(getattr(self.value, 'shape', ()))}, {self.spec!r})"
