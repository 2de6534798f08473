"""Parts of unequal length in one shape: what a rank holds of a sample that another rank holds too.

A short part begins with the last sample of the part before it (`collectives.parts`). Ops that treat samples apart need
not know. Where an op sums over samples, the second copy is set to zero first; its gradient is then zero as well.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..collectives import DimSplit, axis_index
from .axis_layout import AxisLayout, Shard

__all__ = ["add_duplicates", "drop_duplicates", "mask_duplicates", "reduction_identity", "unique_mask"]


def unique_mask(extent: int, place: Shard, axis: str, parts: DimSplit, device: Any) -> torch.Tensor:
    """Which positions along a dim, of which a rank holds `extent`, no rank before it holds."""
    begins_own = axis_index(axis) < parts.full
    rows = (torch.arange(parts.rows, device=device) > 0) | begins_own
    inner = extent // place.outer // parts.rows
    return rows.reshape(1, -1, 1).expand(place.outer, parts.rows, inner).reshape(-1)


def mask_duplicates(x: torch.Tensor, place: AxisLayout, axis: str, parts: DimSplit, fill: float = 0.0) -> torch.Tensor:
    """A rank's part with something else in the place of what another rank holds too.

    Args:
        x: the rank's part.
        place: how the whole value lies.
        axis, parts: the axis, and how it cuts.
        fill: what counts for nothing.
    """
    if parts.is_even or not isinstance(place, Shard):
        return x
    kept = unique_mask(x.shape[place.dim], place, axis, parts, x.device)
    kept = kept.reshape([-1 if dim == place.dim else 1 for dim in range(x.ndim)])
    return torch.where(kept, x, torch.full((), fill, dtype=x.dtype, device=x.device))


def reduction_identity(dtype: torch.dtype, sign: int = 1) -> float:
    """What no maximum notices; with sign -1, no minimum."""
    if dtype == torch.bool:
        return sign < 0
    if dtype.is_floating_point or dtype.is_complex:
        return -sign * math.inf
    return torch.iinfo(dtype).min if sign > 0 else torch.iinfo(dtype).max


def add_duplicates(x: torch.Tensor, form: Shard, parts: DimSplit) -> torch.Tensor:
    """A whole value as all ranks hold it, side by side: equal parts, some samples twice."""
    if parts.is_even:
        return x
    split, inner = _split(x, form, parts.samples)
    bounds = [parts.held(index, parts.rows * inner) for index in parts]
    return _cat(split, bounds, form)


def drop_duplicates(x: torch.Tensor, held: Shard, parts: DimSplit) -> torch.Tensor:
    """All ranks' parts, side by side, as the whole value: every sample once."""
    if parts.is_even:
        return x
    split, inner = _split(x, held, parts.ranks * parts.rows)
    extent = parts.rows * inner
    bounds = [tuple(index * extent + bound for bound in parts.own(index, extent)) for index in parts]
    return _cat(split, bounds, held)


def _split(x: torch.Tensor, place: Shard, count: int) -> tuple[torch.Tensor, int]:
    split = x.unflatten(place.dim, (place.outer, -1))
    return split, split.shape[place.dim + 1] // count


def _cat(split: torch.Tensor, bounds: Any, place: Shard) -> torch.Tensor:
    pieces = [split.narrow(place.dim + 1, begin, end - begin) for begin, end in bounds]
    return torch.cat(pieces, place.dim + 1).flatten(place.dim, place.dim + 1)
