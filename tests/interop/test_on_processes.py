"""Configurations and optimizers that differ between ranks are reported on every rank, with what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import functional_parallel as fp
from functional_parallel.errors import ProgramMismatchError
from sharding_specs import Mesh

from ..processes import run_on_processes

Weights = torch.Tensor


def loss(w: Weights, x: torch.Tensor) -> torch.Tensor:
    return (x @ w).square().mean()


def with_a_configuration_per_rank(rank: int, differing: dict[str, Any]) -> str:
    adam = {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.1}}
    file: dict[str, Any] = {"train_batch_size": 4, "optimizer": adam, "gradient_clipping": 1.0}
    config = fp.deepspeed.from_config(file | (differing if rank else {}), mesh=2)
    train = fp.train_step(loss, config.optimizer, Mesh(data=2), config.plan, **config.options)
    with pytest.raises(ProgramMismatchError) as caught:
        train(train.init(torch.ones(2)), torch.ones(4, 2))
    return str(caught.value)


@pytest.mark.parametrize(
    "differing",
    [
        {"gradient_clipping": 0.5},
        {"zero_optimization": {"stage": 2}},
        {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.2}}},
    ],
    ids=["clipping", "stage", "weight decay"],
)
def test_configurations_that_differ_between_ranks_are_reported(differing: dict[str, Any]) -> None:
    for message in run_on_processes(with_a_configuration_per_rank, 2, differing):
        assert "train_step" in message and "rank 1" in message


def with_an_optimizer_per_rank(rank: int) -> str:
    torch.manual_seed(0)
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9 if rank else 0.8)
    step = fp.prepare(module, optimizer, loss=lambda model, x: model(x).mean(), mesh=Mesh(data=2))
    with pytest.raises(ProgramMismatchError) as caught:
        step(torch.ones(4, 2))
    return str(caught.value)


def test_prepared_optimizers_that_differ_between_ranks_are_reported() -> None:
    for message in run_on_processes(with_an_optimizer_per_rank, 2):
        assert "0.8" in message and "0.9" in message
