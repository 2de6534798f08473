"""backend="cudagraphs" has the numbers of steps op by op. tests/runtime/test_cuda_graphs.py tests it without a GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import BackendError
from sharding_specs import Mesh, P

from .training import PLANS, arguments, needs_cuda, step

pytestmark = needs_cuda

OPTIMIZERS = {
    "adamw": fp.optim.adamw(1e-2),
    "host rate": fp.optim.adamw(lambda count: 1e-2 * math.cos(count) if count > 1 else 1e-2),
    "schedule": fp.optim.sgd(fp.optim.schedules.cosine(0.1, 10), momentum=0.9),
    "lion": fp.optim.lion(1e-3),
    "adafactor": fp.optim.adafactor(1e-2),
}
CAPTURED = [name for name in PLANS if name not in ("unequal microbatches", "all")]


def run(plan: Any, mesh: Mesh, dtype: torch.dtype = torch.float64, **options: Any) -> list[torch.Tensor]:
    params, tokens = arguments("cuda", dtype)
    train = step(plan, mesh, **options)
    state, found = train.init(params), []
    for number in range(6):
        state, metrics = train(state, tokens.roll(number, 1))
        found += optree.tree_leaves((train.params(state), metrics.loss))
    return found


def check(
    plan: Any, mesh: Mesh, dtype: torch.dtype = torch.float64, backend: str = "cudagraphs", **options: Any
) -> None:
    pairs = zip(run(plan, mesh, dtype, backend=backend, **options), run(plan, mesh, dtype, **options), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-10 if dtype == torch.float64 else 1e-2, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("name", CAPTURED)
def test_plans(name: str) -> None:
    check(*PLANS[name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    check(*PLANS["zero 3"], optimizer=OPTIMIZERS[name])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: str) -> None:
    check(fp.mixed_precision(precision), Mesh(), torch.float32)


def test_without_donation() -> None:
    check(*PLANS["one rank"], donate=False)


def test_restored_states(tmp_path: Path) -> None:
    params, tokens = arguments("cuda")
    losses = []
    for backend in ("eager", "cudagraphs"):
        train = step(*PLANS["zero 3"], backend=backend)
        state = train.init(params)
        for number in range(6):
            state, metrics = train(state, tokens)
            losses.append(metrics.loss)
            if number == 2:
                train.save(state, tmp_path / backend)
            if number == 3:
                state = train.restore(tmp_path / backend)
    torch.testing.assert_close(losses[6:], losses[:6], rtol=1e-10, atol=1e-10)


def test_a_value_that_the_host_reads_is_refused() -> None:
    f = fp.compile(torch.linalg.eigvalsh, Mesh(), in_specs=P(), out_specs=P(), backend="cudagraphs", name="f")
    with pytest.raises(BackendError, match="cannot capture f, because the host takes part in it"):
        f(torch.eye(3, device="cuda"))


@torch.library.custom_op("tests_cuda::reads", mutates_args=())
def reads(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@reads.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_an_op_that_fails_while_it_is_recorded() -> None:
    f = fp.compile(lambda x: reads(x).sum(), Mesh(), in_specs=P(), out_specs=P(), backend="cudagraphs")
    x = torch.ones(2, device="cuda")
    assert f(x) == 4
    with pytest.raises(BackendError, match=r"tests_cuda\.reads\.default at test_cuda_graphs\.py"):
        f(x)
    assert (x + x).sum() == 4  # the device goes on
