"""Objects per thread, which autograd's threads share with their caller, and replacements for all threads."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def of_thread(name: str, make: Callable[[], T]) -> T:
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


class Replacement:
    """Attributes `(owner, name, value)` of torch that are replaced for all threads while some thread is inside."""

    def __init__(self, *replaced: tuple[Any, str, Any]) -> None:
        self._replaced = replaced
        self.originals: list[Any] = []  # None for an attribute that its owner inherits
        self._lock, self._inside = threading.Lock(), 0

    @contextmanager
    def active(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self.originals = [vars(owner).get(name) for owner, name, _ in self._replaced]
                for owner, name, value in self._replaced:
                    setattr(owner, name, value)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                restored = [] if self._inside else self.originals
                for original, (owner, name, _) in zip(restored, self._replaced, strict=False):
                    delattr(owner, name) if original is None else setattr(owner, name, original)
