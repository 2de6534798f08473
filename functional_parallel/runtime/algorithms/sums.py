"""Adding what several ranks sent, in rank order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ordered_sum"]


def ordered_sum(parts: Sequence[Tensor], accumulated: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """The sum of at least two tensors, one after the other, in `collectives.group`'s order and so with its bits.

    >>> ordered_sum([torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([4.0])])
    tensor([7.])

    Args:
        parts: all alike.
        accumulated: the type to add in; None is their own.
        out: where the sum goes; may be one of the first two parts.
    """
    if accumulated is not None and accumulated != parts[0].dtype:
        total = parts[0].to(accumulated)
        for part in parts[1:]:
            total += part
        return total.to(parts[0].dtype) if out is None else out.copy_(total)
    total = torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        total += part
    return total
