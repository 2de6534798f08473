"""Concatenate tensors without a copy if they are adjacent in memory, like slices of one buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_bytes", "cat_or_view", "flat_or_view", "from_bytes"]


def cat_or_view(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Return `torch.cat(parts, dim)`, without a copy if the tensors are adjacent in memory."""
    first = parts[0]
    outer = first.shape[:dim].numel()
    if outer != 1 or not _follow_each_other(parts):
        return torch.cat(tuple(parts), dim)
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return first.as_strided((torch.Size(shape).numel(),), (1,)).view(shape)


def flat_or_view(parts: Sequence[Tensor]) -> Tensor:
    """Return flat tensors as one flat tensor, without a copy if they are adjacent in memory."""
    return cat_or_view(parts, 0)


def _follow_each_other(parts: Sequence[Tensor]) -> bool:
    storage, end = parts[0].untyped_storage().data_ptr(), parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != end or not part.is_contiguous():
            return False
        end += part.numel()
    return True


def as_bytes(x: Tensor) -> Tensor:
    """View a tensor as flat bytes, for collectives that do not add: every backend then supports every dtype."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(buffer: Tensor, like: Tensor) -> Tensor:
    """View bytes as flat values with the dtype of `like`."""
    return buffer.contiguous().view(like.dtype)
