"""Duplicated samples of uneven shards, which all have one shape (`collectives.dim_split`).

Before an op sums over samples, the second copy is set to zero; its gradient is then zero too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from ..collectives import DimSplit, axis_index
from .axis_layout import AxisLayout, Shard


def unique_mask(extent: int, place: Shard, axis: str, parts: DimSplit, device: torch.device) -> torch.Tensor:
    """Return a mask of the positions along a dim that no earlier rank holds; the rank holds `extent` positions."""
    begins_own = axis_index(axis) < parts.full
    rows = (torch.arange(parts.rows, device=device) > 0) | begins_own
    assert isinstance(place.outer, int), "unequal blocks are split evenly"
    inner = extent // place.outer // parts.rows
    return rows.reshape(1, -1, 1).expand(place.outer, parts.rows, inner).reshape(-1)


def mask_duplicates(x: torch.Tensor, place: AxisLayout, axis: str, parts: DimSplit, fill: float = 0.0) -> torch.Tensor:
    """Replace by `fill`, a neutral element of the op, the samples of a shard that an earlier rank holds too."""
    if parts.is_even or not isinstance(place, Shard):
        return x
    kept = unique_mask(x.shape[place.dim], place, axis, parts, x.device)
    kept = kept.reshape([-1 if dim == place.dim else 1 for dim in range(x.ndim)])
    return torch.where(kept, x, torch.full((), fill, dtype=x.dtype, device=x.device))


def reduction_identity(dtype: torch.dtype, sign: int = 1) -> float:
    if dtype == torch.bool:
        return sign < 0
    if dtype.is_floating_point or dtype.is_complex:
        return -sign * math.inf
    return torch.iinfo(dtype).min if sign > 0 else torch.iinfo(dtype).max


def add_duplicates(x: torch.Tensor, form: Shard, parts: DimSplit) -> torch.Tensor:
    """Concatenate the equal shards of all ranks from a full value; uneven splits duplicate some samples."""
    if parts.is_even:
        return x
    split, inner = _split(x, form, parts.samples)
    bounds = [parts.held(index, parts.rows * inner) for index in parts]
    return _cat(split, bounds, form)


def drop_duplicates(x: torch.Tensor, held: Shard, parts: DimSplit) -> torch.Tensor:
    if parts.is_even:
        return x
    split, inner = _split(x, held, parts.ranks * parts.rows)
    extent = parts.rows * inner
    owned = ((index * extent, parts.own(index, extent)) for index in parts)
    bounds = [(ahead + begin, ahead + end) for ahead, (begin, end) in owned]
    return _cat(split, bounds, held)


def _split(x: torch.Tensor, place: Shard, count: int) -> tuple[torch.Tensor, int]:
    split = x.unflatten(place.dim, (place.outer, -1))
    return split, split.shape[place.dim + 1] // count


def _cat(split: torch.Tensor, bounds: Iterable[tuple[int, int]], place: Shard) -> torch.Tensor:
    pieces = [split.narrow(place.dim + 1, begin, end - begin) for begin, end in bounds]
    return torch.cat(pieces, place.dim + 1).flatten(place.dim, place.dim + 1)
