"""Handles of tensors in runtimes: a tensor or its move, a list with one per class of ranks, or a `PipelineValue`."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

import optree
import torch

from .. import _torch
from ..functions import PyTree
from ..ir import Aval, hollow
from ..ops import copy_beside

Part = torch.Tensor | list[torch.Tensor]  # a value on one rank of a pipeline: its tensor, or one per class of ranks


@dataclass(slots=True, eq=False)
class PipelineValue:
    parts: dict[int, Part]  # of those ranks that are in this process
    holders: frozenset[int] | None  # None means all
    aval: Aval  # on one rank


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class PendingMove:
    """A move in flight. `target` has the shape and the memory of its result, and the values after `wait`."""

    target: torch.Tensor
    copied: Future[torch.Tensor]

    def wait(self) -> torch.Tensor:
        return self.copied.result()


def arrived(handle: T | PendingMove) -> T | torch.Tensor:
    return handle.wait() if isinstance(handle, PendingMove) else handle


def to_device(x: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    """Copy a tensor to a device. The host does not wait for the device, and may write into the tensor afterwards."""
    if x.device.type != "cpu" or device is None or device.type != "cuda" or _torch.is_functorch_wrapped(x):
        return x.to(device)
    if x.ndim == 0:
        return torch.full((), x.item(), dtype=x.dtype, device=device)
    # A copy from main memory waits for all work of the device, unless the memory is pinned.
    pinned = torch.empty_like(x, pin_memory=True, memory_format=torch.contiguous_format).copy_(x)
    return pinned.to(device, non_blocking=True)


def storages(*values: PyTree) -> set[int]:
    found: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            if not _torch.is_functorch_wrapped(value):
                found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, list):
            found |= storages(*value)
        elif isinstance(value, PipelineValue):
            found |= storages(*value.parts.values())
    return found


def device_of(handle: PyTree) -> torch.device | None:
    if isinstance(handle, torch.Tensor):
        return None if handle.is_meta else handle.device
    parts = handle.parts.values() if isinstance(handle, PipelineValue) else handle
    return next(filter(None, map(device_of, parts)), None) if isinstance(parts, Iterable) else None


def moved_to(device: torch.device | None, tree: PyTree) -> PyTree:
    """Return tensors as a runtime on `device` holds them, for a trace: without values, if they are moved there."""

    def moved(leaf: PyTree) -> PyTree:
        stays = not isinstance(leaf, torch.Tensor) or leaf.is_meta or isinstance(leaf, _torch.FakeTensor)
        if stays or device is None or leaf.device == device:
            return leaf
        return hollow(Aval(tuple(leaf.shape), leaf.dtype, device))

    return optree.tree_map(moved, tree)


def is_simulated(handle: PyTree) -> bool:
    """Whether a handle has the values of simulated ranks, not of one rank of real processes."""
    parts = handle.parts.values() if isinstance(handle, PipelineValue) else (handle,)
    return any(isinstance(part, list) for part in parts)


def copy_if_aliased(handle: PyTree, taken: set[int]) -> PyTree:
    """Return a handle with separate memory: copied if its memory is in `taken`. Add its memory to `taken`."""
    if isinstance(handle, PipelineValue):
        parts = {id(part): part for part in handle.parts.values()}
        made = {number: copy_if_aliased(part, taken) for number, part in parts.items()}
        return replace(handle, parts={rank: made[id(part)] for rank, part in handle.parts.items()})
    if isinstance(handle, list):
        return [copy_if_aliased(part, taken) for part in handle]
    if not isinstance(handle, torch.Tensor):
        return handle
    if not handle.is_contiguous() or storages(handle) & taken:
        handle = copy_beside(handle)
    taken |= storages(handle)
    return handle
