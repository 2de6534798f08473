"""Tensors without memory, which torch traces with, and graphs: what these keep, and what they refuse."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from .threads import of_thread

__all__ = [
    "DATA_DEPENDENT_ERRORS",
    "FAKES",
    "FakeTensor",
    "FakeTensorMode",
    "StorageWeakRef",
    "UnsupportedFakeTensor",
    "forget_fakes",
    "forget_names",
    "forgetting_shapes",
    "is_all_true",
    "reads_no_memory",
    "unlogged_fakes",
    "without_constant",
]


try:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    DATA_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (DataDependentOutputException, DynamicOutputShapeException)
except ImportError:  # pragma: no cover - an older or newer spelling
    DATA_DEPENDENT_ERRORS = ()


@contextmanager
def unlogged_fakes() -> Iterator[None]:
    """What fails on fake tensors inside is raised only: torch also logs it, as twenty lines of its own traceback."""
    silent = of_thread("silent", list)
    silent.append(True)
    try:
        yield
    finally:
        silent.pop()


FAKES = logging.getLogger("torch._subclasses.fake_tensor")


@contextmanager
def forgetting_shapes(most: int) -> Iterator[None]:
    """Bound the cache of all fake modes, which holds the result's shape per op and operands and has no bound itself.

    When it has more than `most` entries, what was added inside is dropped again: a kilobyte per entry, which makes a
    second trace of the like faster.
    """
    cache: dict[Any, Any] = getattr(FakeTensorMode, "cache", {})
    known = set(cache)
    try:
        yield
    finally:
        for key in list(cache) if len(cache) > most else ():
            if key not in known:
                cache.pop(key, None)


def forget_names(graph: torch.fx.Graph) -> None:
    """Let a graph forget the names it gave, and with them the nodes that were erased: new nodes may be called alike."""
    graph._graph_namespace = type(graph._graph_namespace)()


def forget_fakes(mode: FakeTensorMode) -> None:
    """Let a mode forget which tensors without memory it made: its notes of them keep `swap_tensors` from them."""
    mode.fake_tensor_converter.tensor_memo.clear()


is_all_true = torch._is_all_true  # what torch.distributions ask about values, under vmap too


def without_constant(fake: torch.Tensor) -> torch.Tensor:
    """A fake without torch's notes of its value, which a trace's writes in place would not change.

    The second one is of scalars, and comes with torch 2.14.
    """
    if isinstance(fake, FakeTensor):
        fake.constant, fake.item_memo = None, None
    return fake


def reads_no_memory(error: Exception) -> bool:
    """Whether a function of torch's in C++ wanted the memory of a tensor that has none, being a fake."""
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _NO_MEMORY)


_NO_MEMORY = ("its data is not allocated yet", "Cannot access data pointer of Tensor that doesn't have storage")


FAKES.addFilter(lambda record: record.levelno != logging.ERROR or not of_thread("silent", list))
