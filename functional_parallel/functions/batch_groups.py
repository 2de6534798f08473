"""Batch norm by the statistics that ranks compute, each of its samples, as torch does under DDP.

The batch counts as ranks × microbatches × samples. Split over the ranks, its statistics need no communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchSplit:
    """Groups of a batch with statistics of their own: the microbatches of each rank, one rank after the other."""

    ranks: int
    microbatches: int
    over_ranks: bool = False  # whether the statistics of a microbatch are those of all ranks

    @property
    def is_whole(self) -> bool:
        """Whether the batch is one group."""
        return self.microbatches == 1 and (self.over_ranks or self.ranks == 1)

    def synchronised(self) -> BatchSplit:
        """Return the split with statistics of all ranks."""
        return replace(self, over_ranks=True)

    def of(self, x: Tensor) -> Tensor:
        """View a batch as (ranks, microbatches, samples, …)."""
        samples, rest = divmod(x.shape[0], self.ranks * self.microbatches)
        if rest or not samples:
            raise ValueError(
                f"batch norm of an input of shape {tuple(x.shape)}: its dim 0 does not divide by {self.ranks} ranks × "
                f"{self.microbatches} microbatches, which have statistics of their own; give a batch that does, or "
                'take those of all ranks: fp.prepare(…, statistics="all")'
            )
        return x.unflatten(0, (self.ranks, self.microbatches, samples))


def weights_of(momentum: float, split: BatchSplit) -> list[float]:
    """Return the weight of each microbatch in a running average that takes one after the other."""
    return [momentum * (1 - momentum) ** later for later in reversed(range(split.microbatches))]


def batch_norm_of_groups(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    split: BatchSplit,
    weights: Sequence[float | Tensor],
    eps: float,
) -> Tensor:
    """Compute batch norm in training from statistics of each group. The running ones are those of the first rank.

    `weights` has the weight of each microbatch in the running statistics. What is left is the weight of the old ones.
    """
    x = split.of(input if input.dtype.itemsize >= 4 else input.float())
    dims = [*([0] if split.over_ranks else []), 2, *range(4, x.ndim)]
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    variance = (centred * centred).mean(dims, keepdim=True)
    if running_mean is not None and running_var is not None:
        count = x.numel() * (1 if split.over_ranks else 1 / split.ranks) / (split.microbatches * x.shape[3])
        _update(running_mean, mean, split, weights)
        _update(running_var, variance * (count / max(count - 1, 1)), split, weights)
    result = centred * torch.rsqrt(variance + eps)
    shape = [-1] + [1] * (x.ndim - 4)
    result = result * weight.reshape(shape) if weight is not None else result
    result = result + bias.reshape(shape) if bias is not None else result
    return result.flatten(0, 2).to(input.dtype)


def _update(running: Tensor, found: Tensor, split: BatchSplit, weights: Sequence[float | Tensor]) -> None:
    """Add the weighted statistics of the microbatches of the first rank, of shape (ranks, microbatches, …)."""
    of_each = torch.stack([torch.as_tensor(weight, dtype=running.dtype, device=running.device) for weight in weights])
    first = torch.zeros(found.shape[0], 1, dtype=running.dtype, device=running.device)
    first[0] = 1
    found = found.detach().to(running.dtype).reshape(*found.shape[:2], -1)
    new = (found * (first * of_each).unsqueeze(-1)).sum((0, 1))
    running.copy_(running * (1 - of_each.sum()) + new)
