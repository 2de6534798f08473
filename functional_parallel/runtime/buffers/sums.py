"""Sum of the operands of several ranks, in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ordered_sum"]


def ordered_sum(parts: Sequence[Tensor], out: Tensor, accumulated: torch.dtype | None = None) -> Tensor:
    """Sum tensors of one shape and dtype sequentially, in the order of `collectives.group` and so with identical bits.

    `out` may be one of them. There are at least two.
    """
    if accumulated is not None and accumulated != parts[0].dtype:
        total = torch.add(parts[0].to(accumulated), parts[1])
        for part in parts[2:]:
            total += part
        return out.copy_(total)
    disturbs = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    total = torch.add(parts[0], parts[1], out=torch.empty_like(out) if disturbs else out)
    for part in parts[2:]:
        total += part
    return out.copy_(total) if disturbs else out
