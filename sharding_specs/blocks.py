"""Blocks of a dim, each of which an axis splits: a number of equal ones, or the relative sizes of unequal ones.

A fused weight of queries, keys and values with 4, 2 and 2 heads has the blocks `(2, 1, 1)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeAlias

import torch

Blocks: TypeAlias = int | tuple[int, ...]


def blocks_of(sizes: Sequence[int]) -> Blocks:
    """Return the blocks with these sizes, in lowest terms: `(2, 1, 1)` for 32, 16, 16, and 2 for 8, 8."""
    unit = math.gcd(*sizes)
    return len(sizes) if min(sizes) == max(sizes) else tuple(size // unit for size in sizes)


def units(blocks: Blocks) -> int:
    """Return the number of units of all blocks. Ranks divide each block if they divide the unit."""
    return blocks if isinstance(blocks, int) else sum(blocks)


def lengths(blocks: Blocks, extent: int) -> list[int]:
    """Return the length of each block of a dim of size `extent`."""
    return [extent // units(blocks) * size for size in _sizes(blocks)]


def nested(outer: Blocks, inner: Blocks) -> Blocks:
    """Return the blocks `inner` of each block of `outer`: `(2, 2, 1, 1)` for `(2, 1)` and 2."""
    if isinstance(outer, int) and isinstance(inner, int):
        return outer * inner
    return blocks_of([mine * its for mine in _sizes(outer) for its in _sizes(inner)])


def inside(blocks: Blocks, outer: Blocks) -> Blocks | None:
    """Return the blocks of each block of `outer`, the inverse of `nested`; None if they cut across those of `outer`."""
    if isinstance(blocks, int) and isinstance(outer, int):
        return None if blocks % outer else blocks // outer
    sizes, count = _sizes(blocks), len(_sizes(outer))
    inner = blocks_of(sizes[: len(sizes) // count]) if len(sizes) % count == 0 else None
    return inner if inner is not None and nested(outer, inner) == blocks else None


def between(blocks: Blocks, extent: int, start: int, length: int) -> Blocks | None:
    """Return the blocks of a slice of a dim, or None if it does not begin and end at borders of blocks."""
    if isinstance(blocks, int):
        block = extent // blocks
        return length // block if length > 0 and start % block == 0 == length % block else None
    borders = [0, *accumulate(lengths(blocks, extent))]
    if length <= 0 or start not in borders or start + length not in borders:
        return None
    return blocks_of(blocks[borders.index(start) : borders.index(start + length)])


def by_rank(x: torch.Tensor, dim: int, blocks: Blocks, ranks: int) -> torch.Tensor:
    """Reorder a dim of blocks, each with a slice per rank, so that the slices of a rank are contiguous."""
    pieces = x.split(lengths(blocks, x.shape[dim]), dim)
    return torch.cat([piece.unflatten(dim, (ranks, -1)) for piece in pieces], dim + 1).flatten(dim, dim + 1)


def by_block(x: torch.Tensor, dim: int, blocks: Blocks, ranks: int) -> torch.Tensor:
    """Undo `by_rank`."""
    rows = x.unflatten(dim, (ranks, -1))
    pieces = rows.split(lengths(blocks, rows.shape[dim + 1]), dim + 1)
    return torch.cat([piece.flatten(dim, dim + 1) for piece in pieces], dim)


def _sizes(blocks: Blocks) -> tuple[int, ...]:
    return (1,) * blocks if isinstance(blocks, int) else blocks
