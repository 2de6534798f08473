"""Positions of a shard's elements in the full tensor, as a sum of one number per dim and of one for the rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives import DimSplit, axis_index, axis_size


@dataclass(frozen=True)
class Positions:
    """Positions relative to the first element, by digits. A stride of 0 selects the next table, with its numbers."""

    sizes: Sequence[int]
    strides: Sequence[int]
    tables: Sequence[Tensor] = ()

    def of_digits(self, device: torch.device, begin: int = 0, end: int | None = None) -> Tensor:
        found, tables = torch.zeros(1, dtype=torch.int64, device=device), iter(self.tables)
        for size, stride in list(zip(self.sizes, self.strides, strict=True))[begin:end]:
            of_digit = torch.arange(size, device=device) * stride if stride else next(tables)
            found = (found[:, None] + of_digit).reshape(-1)
        return found


def positions(
    like: Tensor, shape: Sequence[int], axes: Sequence[str], splits: Sequence[int]
) -> tuple[int | Tensor, Positions]:
    """Return the position of the first element of a shard like `like`, and the positions of all relative to it.

    `shape` is the global shape. `splits` has three numbers per axis, innermost transform first: dim, outer,
    samples. The dim is viewed as (outer, samples, rest), and a rank has its chunk of the samples.
    """
    first: int | Tensor = 0
    sizes, strides, tables, stride = [1], [1], [], 1
    cuts = list(zip(axes, splits[0::3], splits[1::3], splits[2::3], strict=True))
    for dim in reversed(range(len(shape))):
        length = size = like.shape[dim]
        start: int | Tensor = 0
        index: Tensor | None = None
        for axis, where, outer, samples in reversed(cuts):
            if where == dim:
                parts = DimSplit(axis_size(axis), samples)
                if outer > 1 or index is not None:  # the rank has several runs of the dim
                    index = (torch.arange(size, device=like.device) if index is None else index) + start
                    index, start = parts.whole_position(index, axis_index(axis), length, outer), 0
                else:
                    start = start + parts.start(axis_index(axis)) * (length // parts.rows)
                length = parts.whole(length)
        first = first + start * stride
        if index is not None:
            tables.append(index * stride)
            sizes, strides = [size, *sizes], [0, *strides]
        elif strides[0] and sizes[0] * strides[0] == stride:
            sizes[0] *= size
        else:
            sizes, strides = [size, *sizes], [stride, *strides]
        stride *= shape[dim]
    return first, Positions(sizes, strides, tables[::-1])
