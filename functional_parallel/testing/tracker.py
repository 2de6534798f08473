"""Measure live tensors while a program runs, by weak references to storages: without graphs, users or views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch

from .. import _torch
from ..functions import PyTree


class StorageTracker(_torch.TorchDispatchMode):
    def __init__(self) -> None:
        _torch.TorchDispatchMode.__init__(self)
        self.peak = 0
        self._living: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., PyTree],
        types: Iterable[type],
        args: tuple[PyTree, ...] = (),
        kwargs: dict[str, PyTree] | None = None,
    ) -> PyTree:
        result = func(*args, **(kwargs or {}))
        self.hold(result)
        return result

    def hold(self, tree: PyTree) -> None:
        for leaf in optree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and not (leaf.is_meta or isinstance(leaf, _torch.FakeTensor)):
                storage = leaf.untyped_storage()
                self._living[storage._cdata] = (_torch.StorageWeakRef(storage), storage.nbytes())
        self._living = {key: entry for key, entry in self._living.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._living.values()))


@contextmanager
def tracked(held: PyTree = ()) -> Iterator[StorageTracker]:
    """Measure the live tensors of a `with` block, and count the existing tensors `held` with them.

    >>> x = torch.ones(256)                  # 1 KiB
    >>> with tracked(x) as tracker:
    ...     y = (x + 1).relu()               # at most x, the sum and the result
    >>> tracker.peak
    3072
    """
    tracker = StorageTracker()
    tracker.hold(held)
    with tracker:
        yield tracker
