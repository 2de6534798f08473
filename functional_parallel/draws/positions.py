"""Positions of a shard's elements in the full tensor, as a sum of one number per dim and of one for the rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..collectives import DimSplit, axis_index, axis_size


@dataclass(frozen=True)
class Digit:
    """Index along a dim or several contiguous dims. It adds `stride` times itself, or its entry in a table."""

    size: int
    stride: int
    table: Tensor | None = None

    def values(self, device: torch.device) -> Tensor:
        return torch.arange(self.size, device=device) * self.stride if self.table is None else self.table


def positions(
    like: Tensor, shape: Sequence[int], axes: Sequence[str], splits: Sequence[int]
) -> tuple[int | Tensor, list[Digit]]:
    """Return the position of the first element of a shard like `like`, and a digit per dim, outermost first.

    `shape` is that of the full tensor. `splits` has three numbers per axis, innermost transform first: dim, outer,
    samples. The dim is viewed as (outer, samples, rest), and a rank has its chunk of the samples.
    """
    first: int | Tensor = 0
    digits: list[Digit] = []
    stride = 1
    cuts = list(zip(axes, splits[0::3], splits[1::3], splits[2::3], strict=True))
    for dim in reversed(range(len(shape))):
        length = size = like.shape[dim]
        start: int | Tensor = 0
        index: Tensor | None = None
        for axis, where, outer, samples in reversed(cuts):
            if where == dim:
                parts = DimSplit(axis_size(axis), samples)
                if outer > 1 and index is None:  # the rank has several runs of the dim
                    index = torch.arange(size, device=like.device)
                if index is None:
                    start = start + parts.start(axis_index(axis)) * (length // parts.rows)
                else:
                    index = parts.whole_position(index + start, axis_index(axis), length, outer)
                    start = 0
                length = parts.whole(length)
        first = first + start * stride
        below = digits[-1] if digits else Digit(1, stride)
        if index is not None:
            digits.append(Digit(size, 0, index * stride))
        elif size != 1 and below.table is None and below.size * below.stride == stride:
            digits[-1:] = [Digit(below.size * size, below.stride)]
        elif size != 1:
            digits.append(Digit(size, stride))
        stride *= shape[dim]
    return first, digits[::-1]


def count(digits: Sequence[Digit]) -> int:
    return math.prod(digit.size for digit in digits)


def all_values(digits: Sequence[Digit], device: torch.device) -> Tensor:
    """Return the sums of all combinations of digits, in order, as a vector."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for digit in digits:
        found = (found[:, None] + digit.values(device)).reshape(-1)
    return found
