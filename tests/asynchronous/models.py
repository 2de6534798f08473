"""A loss that is exact in integers, and the loops that asynchronous runs are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
from torch import Tensor

import functional_parallel as fp

__all__ = ["batches_of", "drawn", "integers", "mean_loss", "sum_loss", "synchronous"]


def integers(*shape: int, seed: int, top: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-top, top + 1, shape, generator=generator).double()


def drawn(seed: int, width: int = 4) -> dict[str, Tensor]:
    return {"w": integers(3, width, seed=seed), "b": integers(width, seed=seed + 1)}


def sum_loss(params: Any, x: Tensor) -> Tensor:
    hidden = (x @ params["w"]).relu() + params["b"]
    return (hidden * hidden).sum()


def mean_loss(params: Any, x: Tensor) -> Tensor:
    hidden = (x @ params["w"]).relu() + params["b"]
    return (hidden * hidden).sum(1).mean()


def batches_of(sizes: Sequence[int], steps: int, seed: int) -> list[list[Tensor]]:
    """One batch per step and rank; ranks have different numbers of samples."""
    return [
        [integers(size, 3, seed=seed + 100 * step + rank) for rank, size in enumerate(sizes)] for step in range(steps)
    ]


def synchronous(loss: Any, params: Any, optimizer: fp.optim.Optimizer, batches: list[list[Tensor]]) -> Any:
    """The plain loop, on the samples of all ranks together."""
    state = optimizer.init(params)
    for parts in batches:
        gradients = torch.func.grad(loss)(params, torch.cat(parts))
        params, state = optimizer.update(gradients, state, params)
    return optree.tree_map(torch.clone, params)
