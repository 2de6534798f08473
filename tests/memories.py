"""Measure live tensors of each memory while a program runs, without its graph: from what its ops read and move.

On a CPU machine all tensors are in main memory. The tracker knows the memory of the inputs. It follows the ops: a move
says where its copy is, and any other op leaves its results where its operands are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import optree
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from functional_parallel.ops import kind_of_memory

MOVE, INTO = torch.ops.fp.to_memory.default, torch.ops.fp.move_into_.default


@dataclass
class Stored:
    """A storage. `memory` is None for one that is computed from nothing; it is where the ops that read it are."""

    reference: Any
    size: int
    is_number: bool
    memory: str | None
    born: int
    died: int | None = None
    read_in: set[str] = field(default_factory=set)
    made_of: list[Stored] = field(default_factory=list)

    def place(self, memory: str) -> None:
        self.read_in.add(memory)
        for each in self.made_of:
            each.place(memory)

    @property
    def found(self) -> str:
        if self.memory is not None:
            return self.memory
        preferred = "host" if self.is_number else "device"
        return preferred if preferred in self.read_in else next(iter(self.read_in), "device")


class MemoriesTracker(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.time = 0
        self.every: list[Stored] = []
        self.living: dict[int, Stored] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = [leaf for leaf in optree.tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        read = [(self._of(x), x) for x in operands]
        result = func(*args, **(kwargs or {}))
        self.time += 1
        memory = kind_of_memory(args[1]) if func is MOVE else self._memory(read)
        where = "device" if func in (MOVE, INTO) else memory
        for stored, _ in read:
            if stored.memory is None and where is not None:
                stored.place(where)
        self.hold(result, memory, [stored for stored, _ in read if stored.memory is None])
        return result

    @staticmethod
    def _memory(read: list[tuple[Stored, Tensor]]) -> str | None:
        known = [(stored.memory, x) for stored, x in read if stored.memory is not None]
        large = [memory for memory, x in known if x.ndim]
        return next(iter(large), min((memory for memory, _ in known), default=None))  # "device" before "host"

    def _of(self, x: Tensor) -> Stored:
        key = x.untyped_storage()._cdata
        if key not in self.living or self.living[key].reference.expired():
            self.hold(x, None)
        return self.living[key]

    def hold(self, tree: Any, memory: str | None, made_of: list[Stored] | None = None) -> None:
        for key, each in list(self.living.items()):
            if each.reference.expired():
                each.died = self.time
                del self.living[key]
        for leaf in optree.tree_leaves(tree):
            if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.untyped_storage()._cdata not in self.living:
                storage = leaf.untyped_storage()
                new = Stored(StorageWeakRef(storage), storage.nbytes(), not leaf.ndim, memory, self.time)
                new.made_of = list(made_of or ()) if memory is None else []
                self.living[storage._cdata] = new
                self.every.append(new)

    @property
    def peaks(self) -> dict[str, int]:
        """Peak of each memory over all ops."""
        changes: dict[str, Counter[int]] = {}
        for each in self.every:
            change = changes.setdefault(each.found, Counter())
            change[each.born] += each.size
            change[self.time + 1 if each.died is None else each.died] -= each.size
        found = {}
        for memory, change in changes.items():
            alive = found[memory] = 0
            for time in sorted(change):
                if time <= self.time:
                    alive += change[time]
                    found[memory] = max(found[memory], alive)
        return found

    peak = peaks


def zeros_on_device(shape: Any, dtype: torch.dtype) -> Tensor:
    """The result of a collective."""
    x = torch.zeros(shape, dtype=dtype)
    _trackers[-1]._of(x).memory = "device"
    return x


_trackers: list[MemoriesTracker] = []


@contextmanager
def tracked_memories(inputs: Mapping[Any, Tensor], constants: Any, memory_of: Any) -> Iterator[MemoriesTracker]:
    """Track a `with` block, with inputs in the memories that `memory_of` tells of their keys, and constants."""
    tracker = MemoriesTracker()
    x = None
    for key, x in inputs.items():
        tracker.hold(x, memory_of(key))
    tracker.hold(constants, None)
    del inputs, constants, x
    _trackers.append(tracker)
    with tracker:
        yield tracker
    _trackers.pop()
