"""Arguments beside the batch, as a teacher's weights or a queue: microbatches do not cut what data axes leave whole."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

MICROBATCHES = {
    "accumulated": (fp.accumulate(2), {}),
    "a pipeline's": (fp.pipeline("pipe", microbatches=2), {"pipe": 2}),
}


def weights(*sizes: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, m, generator=generator).double() / 2 for n, m in pairwise(sizes)]


def predict(layers: list[Tensor], x: Tensor) -> Tensor:
    for w in layers[:-1]:
        x = torch.tanh(x @ w)
    return x @ layers[-1]


def distilled(params: list[Tensor], x: Tensor, teacher: list[Tensor]) -> Tensor:
    with torch.no_grad():
        wanted = predict(teacher, x)
    return (predict(params, x) - wanted).square().mean()


def same_as_plain(loss: Any, plan: Any, mesh: Mesh, params: Any, *batch: Any) -> None:
    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan)
    state = train.init(params)
    for _ in range(3):
        state, metrics = train(state, *batch)
        slopes, value = torch.func.grad_and_value(loss)(params, *batch)
        params = optree.tree_map(lambda p, g: p - 0.1 * g, params, slopes)
        torch.testing.assert_close(metrics.loss, value, rtol=0, atol=1e-12)
    for found, right in zip(optree.tree_leaves(train.params(state)), optree.tree_leaves(params), strict=True):
        torch.testing.assert_close(found, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MICROBATCHES)
def test_a_teacher_is_not_cut(name: str) -> None:
    """Not even where its lengths, 5 and 7, have nothing in common with those of the batch."""
    outer, axes = MICROBATCHES[name]
    plan = fp.chain(fp.zero(1, "data", batch=(P("data"), P())), outer)
    x = torch.arange(40.0).double().sin().reshape(8, 5)
    same_as_plain(distilled, plan, Mesh(**axes, data=2), weights(5, 6, 3), x, weights(5, 7, 3, seed=1))


@pytest.mark.parametrize("name", MICROBATCHES)
def test_microbatches_are_cut_where_ranks_are(name: str) -> None:
    """Sequences first, samples second, as of a recurrent network."""

    def loss(params: dict[str, Tensor], xs: Tensor, wanted: Tensor) -> Tensor:
        h = xs.new_zeros(xs.shape[1], 4)
        for x in xs:
            h = torch.tanh(x @ params["in"] + h @ params["hidden"])
        return (h @ params["out"] - wanted).square().mean()

    outer, axes = MICROBATCHES[name]
    plan = fp.chain(fp.zero(1, "data", batch=(P(None, "data"), P("data"))), outer)
    params = dict(zip(("in", "hidden", "out"), weights(5, 4, 4, 3), strict=True))
    xs = torch.arange(120.0).double().sin().reshape(3, 8, 5)
    same_as_plain(loss, plan, Mesh(**axes, data=2), params, xs, torch.ones(8, 3).double())


@pytest.mark.parametrize("name", MICROBATCHES)
def test_without_a_data_axis_a_teacher_is_cut_and_put_together(name: str) -> None:
    outer, axes = MICROBATCHES[name]
    x = torch.arange(24.0).double().sin().reshape(4, 6)
    mesh = Mesh(**axes) if axes else Mesh(data=1)
    same_as_plain(distilled, outer, mesh, weights(6, 8, 4), x, weights(6, 8, 4, seed=1))
