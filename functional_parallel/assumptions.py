"""What a program takes for granted besides its arguments, as a module's mode; when that changes, another is traced.

A program is a trace, so what a function reads from elsewhere is frozen in it. Where the library knows what is read, it
says so while it is traced, and the program is used only as long as the same would be read again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from . import _torch

__all__ = ["Assumption", "Programs", "assume", "assumed"]


@dataclass(frozen=True)
class Assumption:
    """That something still reads as it did."""

    read: Callable[[], Hashable]
    found: Hashable

    def holds(self) -> bool:
        return self.read() == self.found


def assume(read: Callable[[], Hashable]) -> None:
    """Let what is being traced be used only as long as this reads the same; without a trace nothing happens."""
    for found in _open():
        found.append(Assumption(read, read()))


@contextmanager
def assumed() -> Iterator[list[Assumption]]:
    """What is assumed inside."""
    found: list[Assumption] = []
    _open().append(found)
    try:
        yield found
    finally:
        _open().pop()


def _open() -> list[list[Assumption]]:
    return _torch.of_thread("assumptions", list)


class Assuming(Protocol):
    @property
    def assumptions(self) -> list[Assumption]: ...


T = TypeVar("T", bound=Assuming)


class Programs(Generic[T]):
    """What was traced, by what it was traced for; of several for the same, the one whose assumptions hold."""

    def __init__(self) -> None:
        self._found: dict[Hashable, list[T]] = {}

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was traced for this, or is traced now."""
        found = self._found.setdefault(key, [])
        for each in found:
            if all(assumption.holds() for assumption in each.assumptions):
                return each
        found.append(make())
        return found[-1]
