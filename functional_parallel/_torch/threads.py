"""An object that each thread of a program has one of, autograd's own threads included."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

__all__ = ["of_thread"]


T = TypeVar("T")


def of_thread(name: str, make: Callable[[], T]) -> T:
    """An object that each thread has one of, but for those in which autograd runs a backward: theirs is the caller's.

    On CUDA a backward runs in such threads, and what stands around it in the program must hold there too, which
    `threading.local` and context variables do not see to. torch hands these on with the rest of a thread's state.
    """
    key = f"functional_parallel.{name}"
    if not torch._C._is_key_in_tls(key):
        _stash(key, make())
    found: T = torch._C._get_obj_in_tls(key)
    return found


def _stash(key: str, value: object) -> None:
    """Have torch keep an object for this thread. Before 2.12 it lets go of one that it never took hold of."""
    before = sys.getrefcount(value)
    torch._C._stash_obj_in_tls(key, value)
    if sys.getrefcount(value) == before:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
