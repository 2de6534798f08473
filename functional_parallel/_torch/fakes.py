"""Fake tensors and graphs: logging, caches, notes that they keep, and errors that they raise."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef

from .stand_in import FakeTensorMode
from .threads import of_thread, pushed
from .transforms import disable_functorch

DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException)


def unlogged_fakes() -> AbstractContextManager[None]:
    """Silence torch's log of errors on fake tensors, twenty lines of traceback each. The errors are still raised."""
    return pushed(of_thread("silent", list[bool]), True)


@contextmanager
def forgetting_shapes(most: int) -> Iterator[None]:
    """Drop the entries that were added inside from the shared cache of fake modes, if it then has more than `most`."""
    # An entry has the shape of a result, by op and operands. It takes a kilobyte and makes a similar trace faster.
    cache: dict[Any, Any] = getattr(FakeTensorMode, "cache", {})
    known = set(cache)
    try:
        yield
    finally:
        for key in list(cache) if len(cache) > most else ():
            if key not in known:
                cache.pop(key, None)


def forget_names(graph: torch.fx.Graph) -> None:
    """Reset the namespace of a graph, so that new nodes can reuse the names of erased nodes."""
    graph._graph_namespace = type(graph._graph_namespace)()


def forget_fakes(mode: FakeTensorMode) -> None:
    """Clear the record of the fake tensors that a mode created. The record prevents `swap_tensors` on them."""
    mode.fake_tensor_converter.tensor_memo.clear()


is_all_true = torch._is_all_true  # the test of values in torch.distributions, also under vmap


def without_constant(fake: torch.Tensor) -> torch.Tensor:
    """Remove torch's record of the value of a fake tensor. In-place writes of a trace would not update it."""
    # `item_memo` is for scalars and exists since torch 2.14.
    if isinstance(fake, FakeTensor):
        fake.constant, fake.item_memo = None, None
    return fake


def added_attributes(x: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that code has set on a tensor, such as `x.aux = …`, without torch's own attributes."""
    found = vars(x)
    return {name: found[name] for name in found.keys() - _attributes_of_a_fake()} if found else {}


@cache
def _attributes_of_a_fake() -> frozenset[str]:
    with disable_functorch(), FakeTensorMode():
        return frozenset({"_is_param", *vars(torch.empty(()))})


def reads_no_memory(error: Exception) -> bool:
    """Whether `error` is from a C++ function of torch that accessed the memory of a fake tensor."""
    return isinstance(error, RuntimeError) and any(each in str(error) for each in _NO_MEMORY)


_NO_MEMORY = ("its data is not allocated yet", "Cannot access data pointer of Tensor that doesn't have storage")


logging.getLogger("torch._subclasses.fake_tensor").addFilter(
    lambda record: record.levelno != logging.ERROR or not of_thread("silent", list)
)
