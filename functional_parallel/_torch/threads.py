"""Objects per thread. Autograd's threads share the objects of the thread that called the backward."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

__all__ = ["of_thread", "pushed"]

T = TypeVar("T")


def of_thread(name: str, make: Callable[[], T]) -> T:
    """Return this thread's object `name`, created by `make` at the first call."""
    # In a thread where autograd runs a backward, it is the object of the caller's thread. On CUDA a backward runs in
    # such threads, and the contexts around it must apply there too. `threading.local` and context variables do not
    # provide this. torch copies its objects together with the rest of a thread's state.
    key = f"functional_parallel.{name}"
    if not torch._C._is_key_in_tls(key):
        _stash(key, make())
    found: T = torch._C._get_obj_in_tls(key)
    return found


@contextmanager
def pushed(stack: list[T], value: T) -> Iterator[None]:
    """Append a value to a list inside a `with` block."""
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()


def _stash(key: str, value: object) -> None:
    """Store an object in torch's state of this thread. Before 2.12, torch releases a reference that it never took."""
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(key, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
