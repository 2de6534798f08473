"""Tensors of several ranks: joined without a copy if they are adjacent in memory, and as bytes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def cat_or_view(parts: Sequence[Tensor], dim: int) -> Tensor:
    first = parts[0]
    flat = flat_if_adjacent(parts) if first.shape[:dim].numel() == 1 else None
    if flat is None:
        return torch.cat(tuple(parts), dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return flat.view(shape)


def flat_if_adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Return a flat view of contiguous tensors that are adjacent in memory, like slices of one buffer; else None."""
    storage, end = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    return parts[0].as_strided((end - parts[0].storage_offset(),), (1,))


def as_bytes(x: Tensor) -> Tensor:
    """View a tensor as flat bytes, for collectives that do not add: every backend then supports every dtype."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(buffer: Tensor, like: Tensor) -> Tensor:
    return buffer.contiguous().view(like.dtype)
