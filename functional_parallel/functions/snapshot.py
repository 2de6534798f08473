"""Snapshot of Python objects: the identities of their attributes and entries, compared in microseconds.

It opens lists, dicts, sets and plain objects, such as a configuration, but no tensors and modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from types import ModuleType
from typing import Any, NamedTuple

import torch

_MOST = 1000  # entries of a container; a larger one is compared by identity
_DEPTH = 3
_PLAIN = (bool, int, float, complex, str, bytes, frozenset, torch.dtype, torch.device, torch.Size, range, slice)
ABSENT, _END = object(), object()


class Change(NamedTuple):
    """Difference between a snapshot and the present. `attribute` is `name`, or the attribute that contains it."""

    name: str
    attribute: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} was {_shown(self.old)} and is {_shown(self.new)}"


class _Opened(NamedTuple):
    name: str
    has_attributes: bool  # or entries
    container: Any
    entries: dict[Any, Any]  # at first

    def path(self, key: Any) -> str:
        return f"{self.name}.{key}".lstrip(".") if self.has_attributes else f"{self.name}[{key!r}]"


class Snapshot:
    """Snapshot of attributes, by object. `others` reads values that are compared by equality."""

    def __init__(
        self,
        roots: Iterable[tuple[str, Mapping[Any, Any]]],
        others: Callable[[], list[Any]] = list,
        ignored: Collection[str] = (),
    ) -> None:
        self._ignored, self._others = ignored, others
        self._opened: dict[int, _Opened] = {}
        for name, root in roots:
            self._open(name, True, root, 0)
        self._known = others()
        self._watch()

    def holds(self) -> bool:
        """Whether all objects are the same as at first."""
        if any(self._empty) or not all(map(is_, chain(chain.from_iterable(self._views), (_END,)), self._values)):
            if next(self.changes(), None) is not None:
                return False
            self._watch()  # other objects with equal values
        return self._others() == self._known

    def _watch(self) -> None:
        """Take the present objects for those at first. Most containers are empty, such as the containers of hooks."""
        held = [each.container for each in self._opened.values()]
        self._empty = [each for each in held if not each]
        views = ((each, each.values()) if isinstance(each, Mapping) else (each,) for each in held if each)
        self._views = [*chain.from_iterable(views)]  # a view follows its dict
        self._values = [*chain.from_iterable(self._views), _END]  # another length puts another object beside the end

    def changes(self) -> Iterator[Change]:
        for each in self._opened.values():
            new = _entries(each.container)
            for key in {**each.entries, **new}:
                values, name = (each.entries.get(key, ABSENT), new.get(key, ABSENT)), each.path(key)
                attribute = name if each.has_attributes else each.name
                if not _same(*values) and attribute not in self._ignored:
                    yield Change(name, attribute, *values)

    def __str__(self) -> str:
        return str(next(self.changes(), "a class, or the memory of a buffer, was replaced"))

    def _open(self, name: str, has_attributes: bool, container: Any, depth: int) -> None:
        if id(container) in self._opened or name in self._ignored:
            return
        opened = _Opened(name, has_attributes, container, _entries(container))
        self._opened[id(container)] = opened
        for key, value in opened.entries.items() if depth < _DEPTH else ():
            inner = value if isinstance(value, (dict, list, set)) else _attributes(value)
            if len(inner) <= _MOST:
                self._open(opened.path(key), inner is not value, inner, depth + 1)


def _entries(container: Any) -> dict[Any, Any]:
    return dict(container if isinstance(container, Mapping) else enumerate(container))


def _attributes(value: Any) -> Mapping[str, Any]:
    is_closed = callable(value) or isinstance(value, ModuleType) or type(value).__module__.split(".")[0] == "torch"
    found = None if is_closed else getattr(value, "__dict__", None)
    return found if isinstance(found, dict) else _NONE


_NONE: Mapping[str, Any] = {}


def _same(a: Any, b: Any) -> bool:
    if a is b or type(a) is not type(b):
        return a is b
    if type(a) is tuple:
        return len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, _PLAIN) and a == b


def _shown(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
