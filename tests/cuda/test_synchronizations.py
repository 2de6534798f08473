"""Steps on a CUDA device never make the host wait for it. torch raises where an op of it would.

A step waits for the event of an earlier step, to see whether its loss was finite. torch does not count that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh

from .training import PLANS, arguments, needs_cuda, on_nccl, step

pytestmark = needs_cuda

CASES: dict[str, tuple[Any, Mesh, dict[str, Any]]] = {
    **{name: (*each, {}) for name, each in PLANS.items()},
    "CUDA graph": (*PLANS["one rank"], {"backend": "cudagraphs"}),
    "seed": (*PLANS["zero 3"], {"seed": 0}),
    "fp16": (fp.mixed_precision("fp16"), Mesh(), {}),
    "schedule": (*PLANS["one rank"], {"optimizer": fp.optim.adamw(fp.optim.schedules.cosine(1e-2, 10))}),
    "host rate": (*PLANS["one rank"], {"optimizer": fp.optim.adamw(lambda count: 0.1 if count > 2 else 0.2)}),
    "lion": (*PLANS["zero 3"], {"optimizer": fp.optim.lion(1e-3)}),
    "local SGD": (fp.local_sgd("data", inner=2), Mesh(data=2), {}),
}


@contextmanager
def no_waits() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def stepped(plan: Any, mesh: Mesh, batch_on: str = "cuda", **options: Any) -> bool:
    """Take steps, the last ones under watch; the first ones compile, record and compare with other ranks."""
    params, tokens = arguments("cuda", torch.float32)
    tokens = tokens.to(batch_on)
    train = step(plan, mesh, **options)
    state = train.init(params)
    for _ in range(4):
        state, _ = train(state, tokens)
    with no_waits():
        for _ in range(4):
            state, _ = train(state, tokens)
    return True


@pytest.mark.parametrize("name", CASES)
def test_steps(name: str) -> None:
    plan, mesh, options = CASES[name]
    assert stepped(plan, mesh, **options)


def ran(batch_on: str) -> bool:
    return stepped(fp.zero(3, "data"), Mesh(data=1), batch_on, seed=0)


@pytest.mark.parametrize(("batch_on", "port"), [("cuda", 29563), ("cpu", 29564)])
def test_under_nccl(batch_on: str, port: int) -> None:
    assert on_nccl(partial(ran, batch_on), port)
