"""What a program takes for granted besides its arguments, as a module's mode; when that changes, another is traced.

A program is a trace, so what a function reads from elsewhere is frozen in it. Where the library knows what is read, it
says so while it is traced, and the program is used only as long as the same would be read again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from sharding_specs import tree_paths

from .. import _torch

__all__ = ["Assumption", "ProgramCache", "assume", "collect_assumptions"]


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
def collect_assumptions() -> Iterator[list[Assumption]]:
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
Key = tuple[Any, tuple[Any, ...]]  # a tree, and how each of its leaves looks

_MANY = 32  # programs of one function; a warning comes with so many, and again with twice as many
_MOST = 3  # leaves that it names


class ProgramCache(Generic[T]):
    """What was traced, by what it was traced for; of several for the same, the one whose assumptions hold.

    Args:
        name: whose programs they are, for a warning when they become many.
        below: how many calls of ours lie between the user's line and `get`.
    """

    def __init__(self, name: str, below: int) -> None:
        self._name, self._below, self._found = name, below, dict[Key, list[T]]()
        self._warn_at = _MANY

    def get(self, key: Key, make: Callable[[], T]) -> T:
        """What was traced for this, or is traced now."""
        if key not in self._found and len(self._found) >= self._warn_at:
            self._warn(key)
        found = self._found.setdefault(key, [])
        for each in found:
            if all(assumption.holds() for assumption in each.assumptions):
                return each
        found.append(make())
        return found[-1]

    def _warn(self, key: Key) -> None:
        last = next(reversed(self._found))
        warnings.warn(
            f"{self._name} has traced {len(self._found)} programs, and traces another: {_difference(key, last)}. Every "
            "shape, and every value of what is no tensor, makes a program of its own, which takes as long as the first "
            "one did and is kept: give numbers as tensors, and fill batches up to few shapes (fp.pad_batch)",
            RuntimeWarning,
            stacklevel=self._below + 3,
        )
        self._warn_at *= 2


def _difference(key: Key, last: Key) -> str:
    """How what a function is traced for differs from what it was traced for before."""
    (tree, looks), (last_tree, last_looks) = key, last
    if tree != last_tree:
        return "its arguments have another structure than those before"
    paths = tree_paths(tree.unflatten(range(len(looks))))
    changes = [
        f"{path or 'the argument'} is {_text(look)} after {_text(before)}"
        for path, look, before in zip(paths, looks, last_looks, strict=True)
        if look != before
    ]
    return ", ".join([*changes[:_MOST], *(["and more"] if len(changes) > _MOST else [])])


def _text(look: Any) -> str:
    """How a leaf looks: a tensor's shape and dtype, else its value, after its type or by itself."""
    if isinstance(look, tuple) and isinstance(look[0], tuple | torch.Size):
        return f"{str(look[1]).removeprefix('torch.')}{list(look[0])}"
    return str(look if isinstance(look, str) else look[-1])
