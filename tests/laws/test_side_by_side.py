"""Batches laid side by side, as preferred and other answers, or two views of an image, stay split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..some_cases import one_in

Loss = Callable[[Any, Tensor, Tensor], Tensor]


def net(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.relu(x @ params["first"]) @ params["second"]


def preferred(params: Any, a: Tensor, b: Tensor) -> Tensor:
    better, worse = net(params, torch.cat([a, b])).chunk(2)
    return ((better - worse) ** 3).sum()


def sliced(params: Any, a: Tensor, b: Tensor) -> Tensor:
    both = net(params, torch.cat([a, b, a * b]))
    return (both[: len(a)] * both[len(a) : 2 * len(a)] + both[-len(a) :] ** 2).sum()


def nested(params: Any, a: Tensor, b: Tensor) -> Tensor:
    both = torch.cat([torch.cat([a, b]), b - a])
    first, last = net(params, both).split([2 * len(a), len(a)])
    return (first**2).sum() + (last * first[: len(a)]).sum()


def beside_what_is_whole(params: Any, a: Tensor, b: Tensor) -> Tensor:
    both = net(params, torch.cat([torch.arange(8.0).double()[:, None].expand(8, 4), a, b]))
    return (both**2).sum() + (both[8:16] ** 3).sum()


def along_columns(params: Any, a: Tensor, b: Tensor) -> Tensor:
    hidden = torch.relu(a @ params["first"])
    both = torch.cat([hidden, torch.relu(b @ params["first"])], dim=1)
    left, right = both.chunk(2, 1)
    return ((left * right) @ params["second"]).square().sum() + (both**2).sum()


def contrasted(params: Any, a: Tensor, b: Tensor) -> Tensor:
    z = net(params, torch.cat([a, b]))
    return (z @ z.T).relu().sum() + (z * z.roll(len(a), 0)).sum()


LOSSES: dict[str, Loss] = {
    f.__name__: f for f in (preferred, sliced, nested, beside_what_is_whole, along_columns, contrasted)
}
RULES = {"first": P(None, "tensor"), "second": P("tensor")}
TENSOR = fp.tensor_parallel("tensor", RULES)
PLANS: dict[str, tuple[Any, Mesh]] = {
    "data": (fp.data_parallel("data"), Mesh(data=4)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "tensor": (fp.chain(TENSOR, fp.zero(1, "data")), Mesh(data=2, tensor=2)),
    "two data axes": (fp.chain(fp.zero(3, "shard"), fp.data_parallel("replica")), Mesh(replica=2, shard=2)),
    "microbatches": (fp.chain(fp.zero(2, "data"), fp.accumulate(2)), Mesh(data=2)),
    "unequal microbatches": (fp.chain(fp.data_parallel("data"), fp.accumulate(3)), Mesh(data=2)),
}


def integers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def arguments() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    params = {"first": integers(4, 4, seed=0), "second": integers(4, 2, seed=1)}
    return params, integers(8, 4, seed=2), integers(8, 4, seed=3)


@one_in(4, name=LOSSES, plan=PLANS)
def test_values_and_gradients(name: str, plan: str) -> None:
    fp.testing.assert_equivalent(LOSSES[name], *PLANS[plan], *arguments(), exact=True)


@pytest.mark.parametrize("name", ["preferred", "sliced", "nested", "beside_what_is_whole"])
def test_only_sums_are_sent(name: str) -> None:
    program = fp.compile(fp.grad_and_value(fp.data_parallel("data")(LOSSES[name])), Mesh(data=2)).lower(*arguments())
    assert {kind for kind, _ in program.counts()} == {"psum"}


def test_a_pipeline_takes_pairs() -> None:
    def loss(params: Any, a: Tensor, b: Tensor) -> Tensor:
        better, worse = net(params, torch.cat([a, b])).chunk(2)
        return -F.logsigmoid((better - worse).sum(1)).mean()

    plan = fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=2))
    fp.testing.assert_equivalent(loss, plan, Mesh(pipe=2, data=2), *arguments(), rtol=1e-12)
