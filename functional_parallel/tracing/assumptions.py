"""Assumptions of a program besides its arguments, such as the mode of a module.

If an assumption no longer holds, the function is retraced.

A program is a trace, so values that a function reads from elsewhere are frozen in it. Where the library knows such a
read, it records an assumption during tracing. The program is used only while the read returns the same value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sharding_specs import tree_paths

from .. import _torch
from ..errors import RestagingWarning
from ..ir import LeafSignature, TensorSignature, current_source, warn_at


@dataclass(frozen=True)
class Assumption:
    """Assumption that `read` still returns the value that it returned during tracing."""

    read: Callable[[], Hashable]
    found: Hashable
    describe: Callable[[], str] | None = None  # difference between the value now and `found`

    def holds(self) -> bool:
        return self.read() == self.found


def assume(read: Callable[[], Hashable], describe: Callable[[], str] | None = None) -> None:
    """Allow the current trace to be used only while `read` returns the same value. Without a trace, do nothing."""
    for found in _open():
        assumption = Assumption(read, read(), describe)
        if assumption not in found:
            found.append(assumption)


@contextmanager
def collect_assumptions() -> Iterator[list[Assumption]]:
    found: list[Assumption] = []
    with _torch.pushed(_open(), found):
        yield found


def is_kept() -> bool:
    return bool(_open())


def _open() -> list[list[Assumption]]:
    return _torch.of_thread("assumptions", list)


class Assuming(Protocol):
    @property
    def assumptions(self) -> list[Assumption]: ...


T = TypeVar("T", bound=Assuming)
Key = tuple[Any, tuple[LeafSignature, ...]]  # a tree, and the signature of each of its leaves

_MANY = 32  # programs of one function that cause a warning; the number doubles after each warning
_MANY_FOR_A_KEY = 8  # programs for one key that cause a warning
_MANY_SHAPES = 4  # traces for different shapes that cause a warning
_MOST = 3  # leaves that the warning names


class ProgramCache(Generic[T]):
    """Cache of traced programs by key. Of several programs for one key, the first with valid assumptions is used."""

    def __init__(self, name: str) -> None:
        self._name, self._found = name, dict[Key, list[T]]()
        self._warn_at = _MANY
        self._has_warned_of_shapes = False

    def get(self, key: Key, make: Callable[[], T]) -> T:
        if key not in self._found and len(self._found) >= self._warn_at:
            self._warn(key)
        found = self._found.setdefault(key, [])
        for each in found:
            if all(assumption.holds() for assumption in each.assumptions):
                return each
        if found and len(found) % _MANY_FOR_A_KEY == 0:
            self._warn_of_changes(found[-1])
        found.append(make())
        if len(found) == 1 and not self._has_warned_of_shapes:
            self._count_shapes(key)
        return found[-1]

    def _count_shapes(self, key: Key) -> None:
        alike = [other for other, found in self._found.items() if found and _are_equal_but_for_shapes(other, key)]
        if len(alike) < _MANY_SHAPES:
            return
        self._has_warned_of_shapes = True
        rows = zip(_paths(key), *(signatures for _, signatures in alike), strict=True)
        path, *shapes = next(row for row in rows if len(set(row[1:])) > 1)
        warn_at(
            current_source(),
            f"{self._name} was traced for {len(alike)} shapes of its arguments: {path} was "
            f"{', '.join(map(_text, shapes))}. Each trace takes as long as the first, and its program is kept. Pad "
            "batches to a few lengths, as in fp.pad_to(batch, [128, 512]), or to one number of rows, by fp.pad_batch",
            RestagingWarning,
        )

    def _warn_of_changes(self, last: T) -> None:
        failed = (each for each in last.assumptions if not each.holds())
        changes = ", ".join(each.describe() for each in failed if each.describe is not None)
        warn_at(
            current_source(),
            f"{self._name} is retraced for the same arguments, because other values that it depends on change between "
            f"calls: {changes or 'a mode, or a constant'}. Each trace takes as long as the first trace and is kept: "
            "pass these values as arguments",
            RuntimeWarning,
        )

    def _warn(self, key: Key) -> None:
        last = next(reversed(self._found))
        warn_at(
            current_source(),
            f"{self._name} has traced {len(self._found)} programs, and traces another: {_difference(key, last)}. Each "
            "shape, and each value that is not a tensor, needs a separate program. Tracing takes as long as the first "
            "time, and all programs are kept. Pass numbers as tensors, and pad batches to few shapes (fp.pad_to)",
            RuntimeWarning,
        )
        self._warn_at *= 2


def _difference(key: Key, last: Key) -> str:
    (tree, signatures), (last_tree, last_looks) = key, last
    if tree != last_tree:
        return "its arguments have another structure than before"
    changes = [
        f"{path} is {_text(look)} after {_text(before)}"
        for path, look, before in zip(_paths(key), signatures, last_looks, strict=True)
        if look != before
    ]
    return ", ".join([*changes[:_MOST], *(["and more"] if len(changes) > _MOST else [])])


def _are_equal_but_for_shapes(key: Key, other: Key) -> bool:
    def without_shapes(each: Key) -> list[LeafSignature]:
        return [x._replace(shape=()) if isinstance(x, TensorSignature) else x for x in each[1]]

    return key[0] == other[0] and without_shapes(key) == without_shapes(other)


def _paths(key: Key) -> list[str]:
    return [path or "the argument" for path in tree_paths(key[0].unflatten(range(len(key[1]))))]


def _text(look: LeafSignature) -> str:
    if isinstance(look, TensorSignature):
        return f"{str(look.dtype).removeprefix('torch.')}{list(look.shape)}"
    return str(look)
