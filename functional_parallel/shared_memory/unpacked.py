"""Results of a collective on a bucket: tensors received into their destination, or sliced from a full result."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ops import UNPACK, UNPACK_INTO


class BucketOutput(Protocol):
    def take(self, index: int) -> Tensor: ...


@dataclass(frozen=True)
class BucketLayout:
    """Layout of tensors in a bucket that holds one run per rank.

    `leaves` has per tensor the arguments of `fp.unpack`: offset of its chunk in a run, shape of the chunk, and the dim
    of the concatenation of the chunks. `targets` has the tensors to overwrite; None allocates a new one.
    """

    runs: int
    leaves: tuple[tuple[int, tuple[int, ...], int], ...]
    targets: tuple[Tensor | None, ...] | None = None

    def target(self, index: int) -> Tensor | None:
        return None if self.targets is None else self.targets[index]


class SlicedBucket:
    """Tensors sliced from a full bucket: views if there is a single run, copies if there are several."""

    def __init__(self, layout: BucketLayout, whole: Tensor) -> None:
        self._layout, self._whole = layout, whole

    def take(self, index: int) -> Tensor:
        offset, shape, dim = self._layout.leaves[index]
        if (target := self._layout.target(index)) is not None:
            written: Tensor = UNPACK_INTO(target, self._whole, self._layout.runs, offset, shape, dim)
            return written
        if self._layout.runs == 1:
            return self._whole[offset : offset + torch.Size(shape).numel()].view(shape)
        unpacked: Tensor = UNPACK(self._whole, self._layout.runs, offset, shape, dim)
        return unpacked


class FlatOutputs:
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors: list[Any] = list(tensors)

    def take(self, index: int) -> Tensor:
        tensor, self._tensors[index] = self._tensors[index], None
        result: Tensor = tensor
        return result


class DirectOutputs:
    """Tensors that runs are written into as they arrive, in pieces from the first to the last."""

    def __init__(self, layout: BucketLayout, dtype: torch.dtype, device: torch.device) -> None:
        self._leaves: list[Any] = []
        self._parts: list[list[_Part]] = [[] for _ in range(layout.runs)]
        for index, (begin, shape, dim) in enumerate(layout.leaves):
            leaf = layout.target(index)
            if leaf is None:
                size = (*shape[:dim], layout.runs * shape[dim], *shape[dim + 1 :])
                leaf = torch.empty(size, dtype=dtype, device=device)
            self._leaves.append(leaf)
            places = leaf.unflatten(dim, (layout.runs, shape[dim])).unbind(dim)
            for parts, place in zip(self._parts, places, strict=True):
                parts.append(_Part(begin, place))

    def keep(self, rank: int, tensors: Sequence[Tensor]) -> None:
        """Skip the tensors of a rank's run that are already at their destination. The run is their concatenation."""
        ends = itertools.accumulate(x.numel() for x in tensors)
        begins = {end - x.numel(): x for x, end in zip(tensors, ends, strict=True)}
        self._parts[rank] = [part for part in self._parts[rank] if not part.is_at(begins.get(part.begin))]

    def write(self, rank: int, begin: int, values: Tensor) -> None:
        for part in self._parts[rank]:
            part.write(begin, values)

    def take(self, index: int) -> Tensor:
        leaf, self._leaves[index] = self._leaves[index], None
        self._parts = []  # everything has arrived
        result: Tensor = leaf
        return result


class _Part:
    """One rank's chunk of a tensor. If its destination is not contiguous, it is written once all of it has arrived."""

    __slots__ = ("_end", "_flat", "_place", "begin")

    def __init__(self, begin: int, place: Tensor) -> None:
        self.begin, self._end, self._place = begin, begin + place.numel(), place
        self._flat = place.view(-1) if place.is_contiguous() else None

    def is_at(self, tensor: Tensor | None) -> bool:
        if tensor is None or self._flat is None or not tensor.is_contiguous():
            return False
        return tensor.data_ptr() == self._flat.data_ptr() and tensor.numel() == self._flat.numel()

    def write(self, begin: int, values: Tensor) -> None:
        first, last = max(begin, self.begin), min(begin + values.numel(), self._end)
        if first >= last:
            return
        values = values[first - begin : last - begin]
        if self._flat is None and last - first == self._end - self.begin:
            self._place.copy_(values.view(self._place.shape))
            return
        if self._flat is None:
            self._flat = values.new_empty(self._end - self.begin)
        self._flat[first - self.begin : last - self.begin].copy_(values)
        if last == self._end and self._flat.data_ptr() != self._place.data_ptr():
            self._place.copy_(self._flat.view(self._place.shape))
            self._flat = None
