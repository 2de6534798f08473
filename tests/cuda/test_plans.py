"""Simulated ranks on a CUDA device compute the CPU's numbers."""

from __future__ import annotations

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh

from .training import PLANS, needs_cuda, trained

pytestmark = needs_cuda


@pytest.mark.parametrize("name", PLANS)
def test_simulated_ranks_on_the_device(name: str) -> None:
    plan, mesh = PLANS[name]
    for a, b in zip(trained("cuda", plan, mesh), trained("cpu", plan, mesh), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_on_the_device(precision: str) -> None:
    plan = fp.mixed_precision(precision)
    got = trained("cuda", plan, Mesh(), torch.float32)
    wanted = trained("cpu", None, Mesh(), torch.float32)
    assert abs(got[-1] - wanted[-1]) < 0.05


def test_dropout_draws_the_same_numbers_everywhere() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (fp.random.dropout(x @ w, 0.5) ** 2).mean()

    values = []
    for device in ("cpu", "cuda"):
        train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), fp.data_parallel("data"), seed=0)
        w, x = torch.ones(4, 4, dtype=torch.float64), torch.arange(32, dtype=torch.float64).view(8, 4)
        values.append(train(train.init(w.to(device)), x.to(device))[1].loss.cpu())
    torch.testing.assert_close(*values)
