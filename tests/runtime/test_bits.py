"""Law 3 on real processes: summed in rank order, every ZeRO stage gives the bits of simulated ranks."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.shared_memory import slots
from sharding_specs import Mesh, split

from ..processes import run_on_processes

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "examples"))
import gpt

CONFIG = gpt.Config(1, 20, 2, 8)  # a width that four ranks do not divide into vectors
STEPS, BATCH = 20, 8

PLANS = {
    "data parallel": fp.data_parallel("data"),
    "zero 1": fp.zero(1, "data"),
    "zero 2": fp.zero(2, "data"),
    "zero 3": fp.zero(3, "data"),
}
FLAT = {f"zero {stage}, flat": fp.zero(stage, "data", layout="flat") for stage in (1, 2)}
HYBRID = {
    "plain": fp.chain(fp.data_parallel("shard"), fp.data_parallel("replica")),
    "hybrid": fp.chain(fp.zero(3, "shard"), fp.data_parallel("replica")),
}


def train(plan: Any, mesh: Mesh, reduction: str, clip: float | None = 1.0) -> list[torch.Tensor]:
    """Twenty steps of AdamW: parameters, optimizer state and losses."""
    params, _ = split(gpt.init(CONFIG, 0))
    step = fp.train_step(
        partial(gpt.loss, config=CONFIG), fp.optim.adamw(1e-2), mesh, plan, clip=clip, reduction=reduction
    )
    tokens = torch.randint(0, 256, (2, BATCH, 9), generator=torch.Generator().manual_seed(0))
    state, losses = step.init(params), []
    for number in range(STEPS):
        state, metrics = step(state, tokens[number % 2])
        losses.append(metrics.loss)
    return optree.tree_leaves((step.whole(state), losses))


def all_plans(rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    found = {name: train(plan, Mesh(data=size), "ordered") for name, plan in PLANS.items()}
    if size == 4:
        mesh = Mesh(replica=2, shard=2)
        found |= {name: train(plan, mesh, "ordered") for name, plan in HYBRID.items()}
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_stage_gives_the_same_bits(size: int) -> None:
    simulated = all_plans(0, size)
    real = run_on_processes(all_plans, size, size, timeout=300)
    for rank, found in enumerate(real):
        for name, result in found.items():
            reference = simulated["plain" if name in HYBRID else "data parallel"]
            differing = [
                index for index, pair in enumerate(zip(result, reference, strict=True)) if not torch.equal(*pair)
            ]
            assert not differing, f"{name} on rank {rank} of {size}"
    assert simulated["data parallel"][-1] < simulated["data parallel"][-STEPS] - 0.5, "the loss fell"


def plans_in_pieces(rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    """As if all were large: packed piece by piece, and summed over the gradients."""
    slots.AT_ONCE, slots.PIECE = 1 << 12, 1 << 10
    return {name: train(plan, Mesh(data=size), "ordered") for name, plan in PLANS.items()}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_large_buckets_give_the_same_bits(size: int) -> None:
    reference = train(PLANS["data parallel"], Mesh(data=size), "ordered")
    for found in run_on_processes(plans_in_pieces, size, size, timeout=300):
        for name, result in found.items():
            assert all(map(torch.equal, result, reference)), name


def flat_plans(rank: int, size: int) -> dict[str, list[torch.Tensor]]:
    """No bound on the norm: a vector's runs sum it in another order."""
    return {name: train(plan, Mesh(data=size), "ordered", None) for name, plan in FLAT.items()}


def test_the_flat_layout_gives_the_same_bits() -> None:
    reference = train(PLANS["data parallel"], Mesh(data=2), "ordered", None)
    for found in run_on_processes(flat_plans, 2, 2, timeout=300):
        for name, result in found.items():
            assert all(map(torch.equal, result, reference)), name


def by_the_backend(rank: int, names: list[str]) -> list[list[torch.Tensor]]:
    return [train(PLANS[name], Mesh(data=2), "fast") for name in names]


@pytest.mark.parametrize(
    "names",  # gradients are summed whole, or in parts
    [["data parallel", "zero 3"], pytest.param(["zero 1", "zero 2"], marks=pytest.mark.slow)],
    ids=str,
)
def test_the_backends_own_sums_are_within_rounding(names: list[str]) -> None:
    (simulated,) = by_the_backend(0, ["data parallel"])
    for found in run_on_processes(by_the_backend, 2, names, timeout=300):
        for result in found:
            torch.testing.assert_close(result, simulated, rtol=1e-3, atol=1e-4)
