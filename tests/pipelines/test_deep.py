"""A model of many parameters: what a step makes of all of them, such as a norm, is a chain as long."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh


@pytest.fixture
def shallow() -> Any:
    """Let Python recurse less deep than the model is, but deep enough for torch."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    yield 400
    sys.setrecursionlimit(usual)


def test_what_microbatches_share_may_be_a_longer_chain_than_python_recurses(shallow: int) -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rate = torch.ones((), dtype=x.dtype)
        for _ in range(shallow):
            rate = torch.sin(rate + w[0])
        return torch.tanh(torch.tanh(x * w[1]) * w[2] * rate).mean()

    w, x = torch.linspace(0.9, 1.1, 3, dtype=torch.float64), torch.arange(4, dtype=torch.float64)
    plan = fp.pipeline("pipe", schedule="gpipe", microbatches=2)
    found = [
        fp.compile(f, mesh)(w, x)
        for f, mesh in ((plan(loss), Mesh(pipe=2)), (fp.data_parallel("data")(loss), Mesh(data=1)))
    ]
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


def test_a_pipeline_of_more_parameters_than_python_recurses(shallow: int) -> None:
    params = list(torch.linspace(0.9, 1.1, shallow // 2, dtype=torch.float64).unbind())

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params:
            x = torch.sin(x * w)
        return x.mean()

    plan = fp.pipeline("pipe", schedule="gpipe", microbatches=2)
    steps = [fp.train_step(loss, fp.optim.sgd(1e-4), *where) for where in ((Mesh(pipe=2), plan), (Mesh(),))]
    found = []
    for train in steps:
        state, metrics = train(train.init(params), torch.arange(4, dtype=torch.float64))
        found.append((torch.stack(train.params(state)), metrics.loss, metrics.grad_norm))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=0)
