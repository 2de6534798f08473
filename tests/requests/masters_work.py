"""Training with masters, on simulated ranks or as the work of one of several processes, and without the library.

Every sum over samples has one summand that is not 0, so no plan changes a bit.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

__all__ = ["BATCH", "by_hand", "loss", "on_a_rank", "parameters", "plan_of", "trained"]

LAYERS, BATCH = 4, 12


def parameters(rows: int, seed: int) -> dict[str, list[Tensor]]:
    """Layers with values between 1/2 and 2 that bfloat16 rounds."""
    generator = torch.Generator().manual_seed(seed)
    return {"layers": [0.5 + 1.5 * torch.rand(rows, 4, generator=generator) for _ in range(LAYERS)]}


def batch(rows: int, step: int) -> Tensor:
    """Samples in which each element is not 0 in exactly one."""
    generator = torch.Generator().manual_seed(1000 + step)
    owner = torch.randint(BATCH, (rows, 4), generator=generator)
    return torch.nn.functional.one_hot(owner, BATCH).permute(2, 0, 1).float()


def loss(params: Any, x: Tensor) -> Tensor:
    for layer in params["layers"]:
        x = x * layer
    return (x.float() ** 2).sum() / 2


def plan_of(compute: str, stage: int, options: dict[str, Any], tensor: bool, microbatches: int, pipe: bool) -> Any:
    transforms = [fp.mixed_precision(compute, loss_scale=options.pop("loss_scale", None))]
    transforms += (
        [fp.tensor_parallel("tensor", {"*": P(None, "tensor")}, batch=P(None, None, "tensor"))] if tensor else []
    )
    transforms += [fp.zero(stage, "data", **options)]
    if pipe:
        transforms += [fp.pipeline("pipe", schedule="1f1b", microbatches=microbatches)]
    elif microbatches > 1:
        transforms += [fp.accumulate(microbatches)]
    return fp.chain(*transforms)


def trained(plan: Any, mesh: Mesh, rows: int, seed: int, steps: int = 3) -> tuple[Any, Any, list[Tensor]]:
    """Masters, the optimizer's state and the losses."""
    train = fp.train_step(loss, fp.optim.adamw(0.05), mesh, plan, reduction="ordered")
    state, losses = train.init(parameters(rows, seed)), []
    for step in range(steps):
        state, metrics = train(state, batch(rows, step))
        losses.append(metrics.loss)
    params, optimizer_state = train.whole(state)
    return params, optimizer_state, losses


def by_hand(compute: torch.dtype, rows: int, seed: int, steps: int = 3) -> tuple[Any, Any]:
    """Masters and the optimizer's state, from torch's autograd at rounded masters."""
    optimizer = fp.optim.adamw(0.05)
    masters = parameters(rows, seed)
    state = optimizer.init(masters)
    for step in range(steps):
        rounded = optree.tree_map(lambda leaf: leaf.to(compute).requires_grad_(), masters)
        loss(rounded, batch(rows, step).to(compute)).backward()
        gradients = optree.tree_map(lambda leaf: leaf.grad.float(), rounded)
        masters, state = optimizer.update(gradients, state, masters)
    return masters, state


def on_a_rank(rank: int) -> list[Any]:
    """Three plans on two processes; every rank returns what it has."""
    torch.set_num_threads(1)
    return [trained(plan_of("bf16", stage, {}, False, 1, False), Mesh(data=2), 5, 0) for stage in (0, 2, 3)]
