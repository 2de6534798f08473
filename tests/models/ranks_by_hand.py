"""A training loop of torch on several ranks with DDP's batch norm, written out in one process."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import nn

Loss = Callable[..., torch.Tensor]


def trained_by_hand(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batches: list[tuple[torch.Tensor, ...]],
    ranks: int,
    microbatches: int,
    over_ranks: bool = False,
) -> list[torch.Tensor]:
    """Train a module and return the losses. Microbatch after microbatch, the buffers are those of rank 0.

    With `over_ranks`, the ranks' samples of a microbatch are one batch, as under SyncBatchNorm.
    """
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        parts = [tensor.chunk(ranks * microbatches) for tensor in batch]
        for microbatch in range(microbatches):
            samples = [tuple(chunks[rank * microbatches + microbatch] for chunks in parts) for rank in range(ranks)]
            if over_ranks:
                samples = [tuple(torch.cat(each) for each in zip(*samples, strict=True))]
            held = [module, *(deepcopy(module) for _ in samples[1:])]  # each begins with the buffers of rank 0
            for rank, mine in zip(held, samples, strict=True):
                if rank is not module:
                    rank.zero_grad()
                value = loss(rank, *mine) / (len(samples) * microbatches)
                value.backward()
                total += value.detach()
            _add_gradients(module, held[1:])
        optimizer.step()
        losses.append(total)
    return losses


def _add_gradients(module: nn.Module, others: list[nn.Module]) -> None:
    for other in others:
        for mine, theirs in zip(module.parameters(), other.parameters(), strict=True):
            if theirs.grad is not None and mine.grad is not None:
                mine.grad += theirs.grad


def tensors_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and buffers by name."""
    return {name: p.detach() for name, p in module.named_parameters()}, dict(module.named_buffers())
