"""Recorded ops on memories, and their replay, which releases each memory after its last op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import optree
import torch

from .. import _torch
from ..functions import PyTree
from ..stateful import tensors_of

Call = Callable[..., PyTree]
Memory = _torch.StorageWeakRef


class CannotDeferError(Exception):
    """Raised for a function that cannot be recorded: it reads values, or does something that cannot be traced."""


@dataclass(frozen=True)
class RecordedView:
    """View of a memory by a tensor at the time of an op. Later the tensor's `data` may be replaced."""

    memory: Memory
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @staticmethod
    def of(fake: torch.Tensor) -> RecordedView:
        if fake.layout != torch.strided or fake.is_conj() or fake.is_neg():
            raise CannotDeferError(f"it makes a {fake.layout} tensor, or one that is conjugated when it is read")
        shape, strides = tuple(fake.shape), tuple(fake.stride())
        return RecordedView(memory_of(fake), fake.dtype, fake.device, shape, strides, int(fake.storage_offset()))

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.shape, self.strides)

    def laid_out(self, result: torch.Tensor) -> torch.UntypedStorage:
        """Return the storage of a result, copied if its kernel did not return the recorded strides and offset."""
        if result.stride() == self.strides and result.storage_offset() == self.offset:
            return result.untyped_storage()
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        memory = torch.empty(self.offset + 1 + last, dtype=self.dtype, device=self.device).untyped_storage()
        self.tensor(memory).copy_(result)
        return memory


@dataclass(frozen=True)
class RecordedOp:
    """Call of an op."""

    call: Call
    given: PyTree = ((), {})  # positional and keyword arguments, with views for tensors
    results: Sequence[RecordedView | None] = ()  # views of the results in new memories; None for the others

    @property
    def memories(self) -> set[Memory]:
        return {
            leaf.memory for leaf in (*optree.tree_leaves(self.given), *self.results) if isinstance(leaf, RecordedView)
        }


@dataclass
class DeferredInit:
    """Recording of a function, which computes its leaves."""

    leaves: list[Any]  # as the function returned them; recorded tensors have only shape, dtype and device
    views: list[RecordedView | None]  # view of each leaf in a memory of the recording, if it lies in one
    ops: list[RecordedOp]
    storages: dict[Memory, torch.UntypedStorage]  # those that exist

    def require_all(self) -> None:
        """Check that the function keeps no tensor except its results. Such a tensor would never get a value."""
        for view in (view for op in self.ops for view in op.results if view is not None):
            if not view.memory.expired():
                raise CannotDeferError(f"it keeps a tensor of shape {view.shape} elsewhere than in what it returns")

    def made(self) -> Iterator[tuple[int, Any]]:
        """Run the ops, once only, and yield each (index, leaf) when complete. The next request frees its memory."""
        last = {memory: number for number, op in enumerate(self.ops) for memory in op.memories}
        waiting: dict[Memory, list[int]] = {}
        for index, view in enumerate(self.views):
            if view is None or view.memory not in last:
                yield index, self._tensor(view or self.leaves[index])
            else:
                waiting.setdefault(view.memory, []).append(index)
        for number, op in enumerate(self.ops):
            self._run(op)
            for memory in (each for each in op.memories if last[each] == number):
                for index in waiting.pop(memory, ()):
                    yield index, self._tensor(self.views[index])
                del self.storages[memory]

    def _run(self, op: RecordedOp) -> None:
        args, kwargs = optree.tree_map(self._tensor, op.given)
        with torch.no_grad():
            results = tensors_of(op.call(*args, **kwargs))
        for result, view in zip(results, op.results, strict=True):
            if view is not None:
                self.storages[view.memory] = view.laid_out(result)

    def _tensor(self, leaf: PyTree) -> PyTree:
        return leaf.tensor(self.storages[leaf.memory]) if isinstance(leaf, RecordedView) else leaf


def memory_of(tensor: torch.Tensor) -> Memory:
    return Memory(tensor.untyped_storage())
