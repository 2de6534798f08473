"""What is computed of the whole batch: once a step before the pipeline fills, or within the one microbatch there is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import functional_parallel as fp
from functional_parallel.errors import PipelineError
from sharding_specs import Mesh

from ..some_cases import one_in
from .networks import assert_close, assert_same, normal


class Recurrent(nn.Module):
    """Its first states are zeros of the batch's length, which the first step multiplies by its weights."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(8 if options.get("bidirectional") else 4, 2)
        self.layers = nn.GRU(4, 4, batch_first=True, **options)

    def forward(self, x: Tensor, begin: Tensor | None = None) -> Tensor:
        return self.last(self.layers(torch.tanh(self.first(x)), begin)[0])


def recurrent(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    fn, params = fp.functional(Recurrent(**options).double())
    return lambda params, x: fn(params, x).sin().mean(), params


STREAMED = [(schedule, samples) for schedule in ("naive", "gpipe", "zb-h1", "interleaved") for samples in (8, 7, 1)]
STREAMED += [("dualpipe-v", 8), ("dualpipe-v", 7)]  # it takes four microbatches or more


@one_in(6, streamed=STREAMED, options=[{}, {"num_layers": 2, "bidirectional": True, "bias": False}])
def test_gated_units_stream(streamed: tuple[str, int], options: dict[str, Any]) -> None:
    (schedule, samples), (loss, params) = streamed, recurrent(**options)
    assert_same(loss, params, normal(samples, 2, 3), schedule=schedule, microbatches=min(samples, 4))


@pytest.mark.parametrize("schedule", ["pipedream", "2bw"])
def test_gated_units_in_an_asynchronous_pipeline(schedule: str) -> None:
    """As those whose first states are handed in."""
    torch.manual_seed(0)
    fn, params = fp.functional(Recurrent(num_layers=2).double())
    x, zeros = normal(8, 2, 3), torch.zeros(8, 2, 4, dtype=torch.float64)

    def trained(loss: Any, *batch: Tensor) -> Any:
        plan = fp.pipeline("pipe", schedule=schedule, microbatches=4)
        train = fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(pipe=2), plan)
        state, losses = train.init(params), []
        for _ in range(2):
            state, metrics = train(state, *batch)
            losses.append(metrics.loss)
        return train.params(state), losses

    handed = trained(lambda p, x, h: fn(p, x, h.transpose(0, 1)).square().mean(), x, zeros)
    assert_close(trained(lambda p, x: fn(p, x).square().mean(), x), handed)


# Each needs the whole batch at once somewhere, or has a gradient that does.
LOSSES: dict[str, Any] = {
    "batch norm": lambda p, x: (F.batch_norm(x @ p["a"], None, None, training=True) @ p["b"] * 0.1).exp().sum(),
    "softmax over samples": lambda p, x: (torch.softmax(x @ p["a"], 0) * torch.tanh(x @ p["b"])).sum(),
    "samples in another order": lambda p, x: (torch.tanh(x @ p["a"]).flip(0) @ p["a"] @ p["b"]).square().mean(),
    "samples against samples": lambda p, x: F.cross_entropy(
        (h := torch.tanh(x @ p["a"]) @ p["b"]) @ h.T, torch.arange(len(x))
    ),
    "a parameter per sample": lambda p, x: (torch.tanh(p["a"].repeat(len(x) // 4, 1) * x) @ p["b"] @ p["a"]).var(),
    "of the batch alone, and of parameters alone": lambda p, x: (
        (x.mean() * p["b"]).sum() + (torch.tanh(x @ p["a"]).flip(0) @ p["b"]).square().mean()
    ),
}


@one_in(3, name=LOSSES, zero=[None, 0, 3])
def test_a_single_microbatch_waits_for_nobody(name: str, zero: int | None) -> None:
    params, x = {"a": normal(4, 4), "b": normal(4, 4)}, normal(8, 4)
    if zero is None:
        assert_same(LOSSES[name], params, x, microbatches=1)
        return
    plan = fp.chain(fp.zero(zero, "data"), fp.pipeline("pipe", microbatches=1))
    step = fp.compile(fp.grad_and_value(plan(LOSSES[name])), Mesh(pipe=2, data=2))
    assert_close(step(params, x), fp.grad_and_value(LOSSES[name])(params, x))


@pytest.mark.parametrize("name", LOSSES)
def test_training_on_a_single_microbatch(name: str) -> None:
    params, x, found = {"a": normal(4, 4), "b": normal(4, 4)}, normal(8, 4), []
    for mesh, plan in ((Mesh(pipe=2), fp.pipeline("pipe", microbatches=1)), (Mesh(data=1), fp.data_parallel("data"))):
        train = fp.train_step(LOSSES[name], fp.optim.adamw(1e-2), mesh, plan, clip=0.1)
        state = train.init(params)
        for _ in range(2):
            state, metrics = train(state, x)
        found.append((train.params(state), metrics.loss, metrics.grad_norm))
    assert_close(*found)


def test_an_update_per_microbatch_waits_for_nobody() -> None:
    """PipeDream sums over nothing: every microbatch has its own update."""
    params, x = {"a": normal(4, 4), "b": normal(4, 4)}, normal(8, 4)
    loss = LOSSES["samples against samples"]
    train = fp.train_step(
        loss, fp.optim.sgd(0.0), Mesh(pipe=2), fp.pipeline("pipe", schedule="pipedream", microbatches=2)
    )
    _, metrics = train(train.init(params), torch.cat([x, x]))
    torch.testing.assert_close(metrics.loss, loss(params, x), rtol=1e-12, atol=0)
    with pytest.raises(PipelineError, match=r"aten\.mm\.default needs all microbatches .*, or use fp\.accumulate$"):
        assert_same(loss, params, x, microbatches=2)


@pytest.mark.parametrize("samples", [16, 22])
def test_pairs_side_by_side_stream(samples: int) -> None:
    """Every other sample, whose partner lies in the same microbatch; 11 pairs are cut as 3, 3, 3 and 2 of them."""

    def loss(params: Any, x: Tensor, weight: Tensor) -> Tensor:
        h = torch.tanh(x @ params["a"])
        return (((h[::2] - h[1::2]) @ params["b"]).square().sum(-1) * weight).mean()

    params = {"a": normal(4, 4), "b": normal(4, 4)}
    assert_same(loss, params, normal(samples, 4), normal(samples // 2))


@pytest.mark.parametrize("data", [1, 2])
def test_normalised_within_groups_of_samples(data: int) -> None:
    """As the message says that refuses a batch norm."""

    def loss(params: Any, x: Tensor) -> Tensor:
        h = (x @ params["a"]).unflatten(0, (4, -1))
        h = torch.func.vmap(lambda group: F.batch_norm(group, None, None, training=True))(h)
        return (torch.tanh(h.flatten(0, 1)) @ params["b"]).square().mean()

    params, x = {"a": normal(4, 4), "b": normal(4, 4)}, normal(16, 4)
    plan = fp.chain(fp.zero(3, "data"), fp.pipeline("pipe", microbatches=4 // data))
    step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=2, data=data))
    assert_close(step(params, x), fp.grad_and_value(loss)(params, x))
