"""Batch norm by the statistics that ranks compute, each of its samples, as torch does under DDP."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class BatchSplit:
    """Groups of a batch with statistics of their own: the microbatches of each rank, one rank after the other."""

    ranks: int
    microbatches: int
    over_ranks: bool = False  # whether the statistics of a microbatch are over all ranks

    @property
    def is_whole(self) -> bool:
        return self.microbatches == 1 and (self.over_ranks or self.ranks == 1)

    def synchronised(self) -> BatchSplit:
        return replace(self, over_ranks=True)

    def of(self, x: Tensor) -> Tensor:
        """View a batch as (ranks, microbatches, samples, …)."""
        samples, rest = divmod(x.shape[0], self.ranks * self.microbatches)
        if rest or not samples:
            raise ValueError(
                f"batch norm of an input of shape {tuple(x.shape)}: its dim 0 does not divide by {self.ranks} ranks × "
                f"{self.microbatches} microbatches; give a batch that does, or leave groups= out of fp.functional"
            )
        return x.reshape(self.ranks, self.microbatches, samples, *x.shape[1:])


def batch_norm_of_groups(
    split: BatchSplit,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float | Tensor = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Compute `F.batch_norm` in training from statistics of each group. The running ones follow the first rank."""
    x = split.of(input if input.dtype.itemsize >= 4 else input.float())
    dims = [*([0] if split.over_ranks else []), 2, *range(4, x.ndim)]
    mean = x.mean(dims, keepdim=True)
    centred = x - mean
    variance = (centred * centred).mean(dims, keepdim=True)
    result = centred * torch.rsqrt(variance + eps)
    if running_mean is not None and running_var is not None:
        count, later = math.prod(x.shape[dim] for dim in dims), range(split.microbatches - 1, -1, -1)
        found = torch.stack([mean, variance * (count / max(count - 1, 1))]).detach().flatten(3)
        weights = [momentum if isinstance(momentum, Tensor) else momentum * (1 - momentum) ** n for n in later]
        of_each = torch.stack([torch.as_tensor(each, dtype=x.dtype, device=x.device) for each in weights])
        first = (torch.arange(found.shape[1], device=x.device) == 0).to(x.dtype).unsqueeze(1)
        new = (found * (first * of_each).unsqueeze(-1)).sum((1, 2))  # one sum over the ranks
        updated = torch.stack([running_mean, running_var]) * (1 - of_each.sum()) + new
        running_mean.copy_(updated[0])
        running_var.copy_(updated[1])
    shape = [-1] + [1] * (x.ndim - 4)
    result = result * weight.reshape(shape) if weight is not None else result
    result = result + bias.reshape(shape) if bias is not None else result
    return result.flatten(0, 2).to(input.dtype)
