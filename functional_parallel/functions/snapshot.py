"""Snapshot of Python objects: which objects their attributes and entries are, compared in microseconds.

Two plain values are the same if they are equal, any other two objects if they are identical. A snapshot opens lists,
dicts, sets and plain objects, such as a configuration, but no tensors and modules.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from operator import is_
from types import ModuleType
from typing import Any

import optree
import torch

_MOST = 1000  # entries of a container; a larger one is compared by identity
_DEPTH = 3
_PLAIN = (bool, int, float, complex, str, bytes, frozenset, torch.dtype, torch.device, torch.Size, range, slice)
_CONTAINERS = (dict, list, set, deque)
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A difference between a snapshot and the present. `name` is that of the attribute, `owner` that has the entry."""

    name: str
    owner: str
    old: Any
    new: Any

    @property
    def was_empty(self) -> bool:
        return self.old is None or self.old is _ABSENT

    @property
    def has_tensor(self) -> bool:
        return any(isinstance(leaf, torch.Tensor) for leaf in optree.tree_leaves(self.new))

    def __str__(self) -> str:
        return f"{self.name} was {_shown(self.old)} and is {_shown(self.new)}"


class Snapshot:
    """Snapshot of the attributes or entries of some roots, by their name, without those named in `ignored`.

    `others` reads values that are compared by equality.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Mapping[Any, Any]]],
        others: Callable[[], list[Any]] = list,
        ignored: Collection[str] = (),
    ) -> None:
        self._ignored, self._others = ignored, others
        self._opened: dict[int, tuple[str, bool, Any]] = {}
        for name, root in roots:
            self._open(name, True, root, 0)
        self._views = [*chain.from_iterable(_views(each) for *_, each in self._opened.values())]
        self._entries = [_entries(each) for *_, each in self._opened.values()]
        self._values, self._known = self._read(), others()

    def holds(self) -> bool:
        """Whether all objects are the same as at first."""
        now = self._read()
        if len(now) != len(self._values) or not all(map(is_, now, self._values)):
            if next(self.changes(), None) is not None:
                return False
            self._values = now  # other objects of the same values
        return self._others() == self._known

    def changes(self) -> Iterator[Change]:
        for (name, is_owner, container), old in zip(self._opened.values(), self._entries, strict=True):
            new = _entries(container)
            for key in {**old, **new}:
                before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
                path = _path(name, is_owner, key)
                owner = path if is_owner else name
                if not _same(before, after) and owner not in self._ignored:
                    yield Change(path, owner, before, after)

    def __str__(self) -> str:
        change = next(self.changes(), None)
        return "a class, or the memory of a buffer, was replaced" if change is None else str(change)

    def _open(self, name: str, is_owner: bool, container: Any, depth: int) -> None:
        if id(container) in self._opened or name in self._ignored:
            return
        self._opened[id(container)] = name, is_owner, container
        for key, value in _entries(container).items() if depth < _DEPTH else ():
            inner = value if isinstance(value, _CONTAINERS) else _attributes(value)
            if inner is not None and len(inner) <= _MOST:
                self._open(_path(name, is_owner, key), inner is not value, inner, depth + 1)

    def _read(self) -> list[Any]:
        return [*chain.from_iterable(self._views)]


def _path(name: str, is_owner: bool, key: Any) -> str:
    return f"{name}.{key}".lstrip(".") if is_owner else f"{name}[{key!r}]"


def _views(container: Any) -> tuple[Iterable[Any], ...]:
    """Return views of the keys and values that follow the container."""
    return (container.keys(), container.values()) if isinstance(container, Mapping) else (container,)


def _entries(container: Any) -> dict[Any, Any]:
    return dict(container if isinstance(container, Mapping) else enumerate(container))


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that only holds values. It is neither a module, a tensor nor a function."""
    if callable(value) or isinstance(value, ModuleType) or type(value).__module__.partition(".")[0] == "torch":
        return None
    found = getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else None


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, _PLAIN) and a == b


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "absent"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
