"""What functions and objects reach: by closures, by globals that a user's functions name, by attributes and by classes.

A user's class is opened too: its methods reach globals, and its attributes are values. Classes and functions of Python
and torch are compared by identity, and so are the objects of `_CLOSED`.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import lru_cache, partial
from threading import local
from types import (
    BuiltinMethodType,
    CellType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from .. import _torch
from ..ir import is_library

# There may be millions of these, as in a table of samples.
_PLAIN = {int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, range}
_CONTAINERS = (list, tuple, set, frozenset, deque)
_NUMBERS: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
_VISIBLE = (*_CONTAINERS, dict, OrderedDict, defaultdict, *_NUMBERS)  # state is what they hold
_DESCRIPTORS = (ClassMethodDescriptorType, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType)
_CONSTANT = (CodeType, re.Pattern, GenericAlias, UnionType, TypeVar, type(NotImplemented), type(...))
_BY_IDENTITY = (type, ModuleType, *_CONSTANT, *_DESCRIPTORS, WrapperDescriptorType)
_CLOSED = ("torch.fx", "torch._ops", "torch._C", "logging", "threading", "_thread", "_io", "_abc")
_CHANGING = (local, torch.Generator)
_ABSENT = "absent"


def visited(*roots: Any, with_classes: bool = False) -> Iterator[tuple[Any, list[Any]]]:
    """Yield the roots, and each object that they reach once. With it yield what it holds, in order."""
    queue: list[Any] = [roots]  # keeps the objects alive, so that no number is used twice
    seen = {id(roots)}
    for held in queue:
        inner = list(_held_by(held)) if with_classes or not isinstance(held, type) else []
        yield held, inner
        for each in inner:
            if type(each) not in _PLAIN and id(each) not in seen:
                seen.add(id(each))
                queue.append(each)


class ReachedState:
    """The state of all objects that some objects reach, as a key. Equal keys are equal states.

    Attributes:
        key: the kinds, values and connections of the objects, with the numbers of those compared by identity.
        kept: objects with numbers in the key. They must live as long as the key.
        objects: all objects but the tensors.
        is_whole: whether the key has all state. An iterator has state that is not visible, for example.

    Args:
        roots: the objects.
        name_of: name of a tensor, which it has in the key.
        most: after so many values the state is not whole, and the key is cut. Without it, classes are not opened.
    """

    def __init__(self, *roots: Any, name_of: Callable[[torch.Tensor], Hashable] = id, most: int | None = None) -> None:
        self.kept, self.objects, self.is_whole = list[Any](), list[Any](), True
        found: list[Hashable] = []
        places: dict[int, int] = {}  # by number of the object, in the order of first sight
        for held, inner in visited(*roots, with_classes=most is not None):
            is_tensor = isinstance(held, torch.Tensor)
            self.objects += [] if is_tensor else [held]
            found += (name_of(held) if is_tensor else self._name(held), len(inner))
            for each in inner:
                found.append(_value(each) if type(each) in _PLAIN else places.setdefault(id(each), len(places)))
            if most is not None and not (self.is_whole and len(found) <= most):
                self.is_whole = False
                break
        self.key = tuple(found)

    def _name(self, held: Any) -> Hashable:
        """Return what an object is besides what it holds."""
        if type(held) is FunctionType:
            held = held.__code__  # a closure that is made again is the same function
        is_whole = not isinstance(held, _CHANGING) and not (isinstance(held, ModuleType) and _is_a_users(held))
        is_one = isinstance(held, _BY_IDENTITY) or _is_closed(type(held))
        if not is_one:
            is_whole = is_whole and (type(held) in _HELD or not _kind(type(held))[0])
        self.is_whole = self.is_whole and is_whole
        if is_one or not is_whole:
            self.kept.append(held)
            return "object", id(held)
        return type(held).__name__


def _value(plain: Any) -> Hashable:
    if type(plain) is complex:
        return complex, plain.real.hex(), plain.imag.hex()
    return (type(plain), plain.hex() if type(plain) is float else plain)  # -0.0 equals 0.0


def _held_by(held: Any) -> Iterable[Any]:
    kind = type(held)
    if isinstance(held, torch.Tensor):
        return _flat(_torch.added_attributes(held))
    if kind in _HELD:
        return _HELD[kind](held)
    if isinstance(held, type):
        return _of_class(held)
    if isinstance(held, (*_BY_IDENTITY, *_CHANGING)) or _is_closed(kind):
        return ()
    return _of_object(held)


def _of_cell(cell: CellType) -> Iterable[Any]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # nothing was assigned yet
        return ()


def _of_function(function: FunctionType) -> Iterator[Any]:
    yield from (*(function.__closure__ or ()), *(function.__defaults__ or ()))
    yield from _flat(function.__kwdefaults__ or {})
    yield from _flat(vars(function))
    yield from _globals_of(function)


def _of_bound(method: Any) -> Iterable[Any]:
    owner = method.__self__
    return (method.__qualname__, method.__module__, None if isinstance(owner, ModuleType) else owner)


_HELD: dict[type, Callable[[Any], Iterable[Any]]] = {
    **dict.fromkeys((list, tuple, set, frozenset), lambda held: held),
    deque: lambda held: (held.maxlen, *held),
    **dict.fromkeys((dict, MappingProxyType), lambda held: _flat(held)),
    slice: lambda held: (held.start, held.stop, held.step),
    CellType: _of_cell,
    FunctionType: _of_function,
    MethodType: lambda held: (held.__func__, held.__self__),
    BuiltinMethodType: _of_bound,
    MethodWrapperType: lambda held: (held.__name__, held.__self__),
    partial: lambda held: (held.func, held.args, held.keywords, *_flat(vars(held))),
    property: lambda held: (held.fget, held.fset, held.fdel),
    staticmethod: lambda held: (held.__func__,),
    classmethod: lambda held: (held.__func__,),
}


def _of_class(kind: type) -> Iterator[Any]:
    if _is_of_library(kind.__module__) or not kind.__flags__ & _HEAP:
        return
    yield from (type(kind), *kind.__bases__)
    for name, value in list(vars(kind).items()):
        if not name.startswith("__") or isinstance(value, _METHODS):
            yield from (name, value)


_HEAP = 1 << 9  # the flag of classes that can be changed
_METHODS = (FunctionType, staticmethod, classmethod, property)


def _of_object(held: Any) -> Iterator[Any]:
    yield type(held)
    kind = next((each for each in (dict, *_CONTAINERS) if isinstance(held, each)), None)
    if kind is dict:  # its own methods may run any code
        yield from (each for item in list(dict.items(held)) for each in item)
        yield held.default_factory if isinstance(held, defaultdict) else None
    elif kind is not None:
        yield from kind.__iter__(held)
    else:  # a subclass, as of an enumeration
        yield from (read(held) for plain, read in _NUMBERS.items() if isinstance(held, plain))
    if type(held).__dictoffset__:
        yield from _flat(vars(held))
    for name in _kind(type(held))[1]:
        yield from (name, getattr(held, name, _ABSENT))


def _flat(items: Any) -> Iterator[Any]:
    return (each for item in list(items.items()) for each in item)


# --- Classes ---

_kinds: WeakKeyDictionary[type, tuple[bool, tuple[str, ...]]] = WeakKeyDictionary()


def _kind(kind: type) -> tuple[bool, tuple[str, ...]]:
    """Whether the objects of a class have state that is not visible, in C, and the slots with the visible state."""
    if kind not in _kinds:
        base = next(each for each in kind.__mro__ if each in _VISIBLE or each is object)
        own = kind.__mro__[: kind.__mro__.index(base)]
        slots = [name for each in own for name, x in vars(each).items() if isinstance(x, MemberDescriptorType)]
        has_dict = kind.__dictoffset__ > 0 or (kind.__dictoffset__ < 0 and kind.__itemsize__ > 0)
        pointers = len(slots) + has_dict + (kind.__weakrefoffset__ > 0)  # others lie before the object
        _kinds[kind] = kind.__basicsize__ > base.__basicsize__ + pointers * tuple.__itemsize__, tuple(slots)
    return _kinds[kind]


def _is_closed(kind: type) -> bool:
    return any(kind.__module__ == each or kind.__module__.startswith(f"{each}.") for each in _CLOSED)


@lru_cache(maxsize=4096)
def _is_of_library(module: str) -> bool:
    if module not in sys.modules:
        return False
    file = getattr(sys.modules[module], "__file__", None)
    return module != "__main__" if file is None else is_library(file)


# --- Globals ---


def _globals_of(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that a user's function names, in its module and, by `module.name`, in other user modules."""
    if is_library(function.__code__.co_filename):
        return
    names, package = _names(function.__code__), function.__globals__.get("__package__")
    imported = (sys.modules.get(each) for name in names for each in (name, f"{package}.{name}"))  # inside the function
    spaces = [function.__globals__, *(vars(each) for each in imported if each is not None and _is_a_users(each))]
    for space in spaces:
        for name, value in ((name, space[name]) for name in names if name in space):
            if not isinstance(value, ModuleType):
                yield from (name, value)
            elif _is_a_users(value) and all(vars(value) is not other for other in spaces):
                spaces.append(vars(value))


def _is_a_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not is_library(file)


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    inner = (name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant))
    return tuple(dict.fromkeys([*code.co_names, *inner]))
