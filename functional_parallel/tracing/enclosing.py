"""Captured tensors that belong to a torch.func transform around the trace.

Tracing disables the levels of such transforms. torch would then treat the tensors as constants, or assign them to a
level that the function itself opens. The derivative would be wrong without an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import optree
import torch
from torch.fx.node import Argument

from .. import _torch
from ..errors import TracingError
from ..ir import Args, Kwargs, current_source, is_library

_CONTAINERS = (list, tuple, set, frozenset, deque)
_PLAIN = {int, float, complex, bool, str, bytes, type(None)}  # there may be millions of these, as in a table of samples


class CapturedTensors:
    """Tensors of an enclosing torch.func transform that a function reaches through its closure or globals."""

    def __init__(self, function: Callable[..., Any]) -> None:
        found = _reached(function) if _torch.is_inside_transform() else ()
        self.tensors = {id(tensor): tensor for tensor in found if _torch.is_functorch_wrapped(tensor)}

    def are_in(self, args: Args, kwargs: Kwargs) -> bool:
        return bool(self.tensors) and any(id(leaf) in self.tensors for leaf in optree.tree_leaves((args, kwargs)))

    def refuse(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Argument:
        """Refuse a call on one of the tensors. Reads of results that are not tensors, such as a shape, are allowed."""
        result = func(*args, **kwargs) if getattr(func, "__name__", "") in _QUESTIONS else NotImplemented
        if result is not NotImplemented and not isinstance(result, torch.Tensor):
            return result
        one = next(leaf for leaf in optree.tree_leaves((args, kwargs)) if id(leaf) in self.tensors)
        raise TracingError(
            f"{current_source() or 'the function'}: it closes over a tensor of shape {tuple(one.shape)} that a "
            "torch.func transform around it differentiates or maps. It would be a constant; pass it as an argument"
        )


_QUESTIONS = {"__get__", "size", "dim", "numel", "stride", "is_floating_point", "is_complex", "__len__", "__repr__"}


def _reached(function: Callable[..., Any]) -> Iterator[torch.Tensor]:
    """Yield every tensor that a function holds or reaches by name, through functions, containers and objects."""
    return (held for held, _ in _visited(function) if isinstance(held, torch.Tensor))


def reached_state(function: Callable[..., Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """Return a key that changes with the values and objects that a function reaches, and objects to keep with it."""
    visited = list(_visited(function))
    key = ((id(held), *((type(each), each) for each in plain)) for held, plain in visited)
    return tuple(key), [held for held, _ in visited]


def _visited(function: Callable[..., Any]) -> Iterator[tuple[Any, Iterable[Any]]]:
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending:
        held = pending.pop()
        if id(held) not in seen:
            seen.add(id(held))
            inner = () if isinstance(held, torch.Tensor) else list(_held_by(held))
            yield held, (each for each in inner if type(each) in _PLAIN)
            pending.extend(each for each in inner if type(each) not in _PLAIN)


def _held_by(held: Any) -> Iterable[Any]:
    if isinstance(held, dict):
        return list(held.values())
    if isinstance(held, _CONTAINERS):
        return held
    if isinstance(held, CellType):
        try:
            return (held.cell_contents,)
        except ValueError:  # nothing was assigned yet
            return ()
    if isinstance(held, FunctionType):
        named = (held.__kwdefaults__ or {}).values()
        return (*(held.__closure__ or ()), *(held.__defaults__ or ()), *named, *_globals_of(held))
    if isinstance(held, MethodType):
        return (held.__func__, held.__self__)
    if isinstance(held, partial):
        return (held.func, held.args, held.keywords)
    if isinstance(held, (type, ModuleType)) or type(held).__module__.startswith(_OPAQUE):
        return ()
    slots = (getattr(held, name, None) for name in getattr(type(held), "__slots__", ()) if name != "__weakref__")
    return (*vars(held).values(), *slots) if hasattr(held, "__dict__") else tuple(slots)


_OPAQUE = ("torch.fx", "torch._", "builtins", "sharding_specs", "logging", "threading", "_thread", "_io", "re")


def _globals_of(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that a user's function names, in its module and, by `module.name`, in other user modules."""
    if is_library(function.__code__.co_filename):
        return
    names, spaces = _names(function.__code__), [function.__globals__]
    for space in spaces:
        for value in (space[name] for name in names if name in space):
            if not isinstance(value, ModuleType):
                yield value
            elif _is_a_users(value) and all(vars(value) is not other for other in spaces):
                spaces.append(vars(value))


def _is_a_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and not is_library(file)


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))
