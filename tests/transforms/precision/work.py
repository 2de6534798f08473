"""Training with a loss scale, in this process or as the work of one of several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

MESH = Mesh(data=2)
_generator = torch.Generator().manual_seed(0)
PARAMS = {"w": torch.randn(4, 3, generator=_generator), "b": torch.zeros(3)}


def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return ((x @ params["w"] + params["b"]).tanh() - 0.5).square().mean()


def good(step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def bad(rank: int) -> Tensor:
    """A batch of which one rank of two has an infinity."""
    x = good(99)
    x[4 * rank + 1, 2] = torch.inf
    return x


def plan(stage: int, loss_scale: Any) -> Any:
    return fp.chain(fp.mixed_precision("bf16", loss_scale=loss_scale), fp.zero(stage, "data"))


def trained(stage: int, batches: list[Tensor], loss_scale: Any, clip: float | None = None) -> Any:
    """Whole parameters and optimizer state after these batches."""
    train = fp.train_step(loss, fp.optim.adamw(0.1), MESH, plan(stage, loss_scale), clip=clip, reduction="ordered")
    state = train.init(PARAMS)
    for batch in batches:
        state, _ = train(state, batch)
    return train.whole(state)


def on_a_rank(rank: int) -> list[Any]:
    """A few runs on real processes; every rank returns what it has."""
    torch.set_num_threads(1)
    rules = fp.LossScale(initial=16.0, hysteresis=1)
    return [trained(stage, BATCHES, rules, clip=0.5) for stage in (0, 1, 3)]


BATCHES = [good(0), bad(1), good(1), bad(0), good(2)]
