"""What ZeRO-1 and 2 bring up to date in parts is written where the parameters lie: own parts, and what others send."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.shared_memory import slots
from functional_parallel.shared_memory.unpacked import BucketLayout, DirectOutputs
from sharding_specs import Mesh

from ..processes import run_on_processes

STEPS, PARAMETERS = 3, 6


def shapes(seed: int, size: int) -> list[tuple[int, ...]]:
    """Of parameters that ranks divide along some dim, or none, whole vectors of the update or not."""
    draw = random.Random(seed)
    lengths = [1, 3, size, 4 * size, 64 * size]
    return [tuple(draw.choices(lengths, k=draw.randint(1, 2))) for _ in range(PARAMETERS)]


def parameters(seed: int, size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes(seed, size)]


def loss(params: list[Tensor], x: Tensor) -> Tensor:
    return sum(((p * x.mean() - 1).square().sum() for p in params), torch.zeros(()))


def train(plan: Any, size: int, seed: int) -> tuple[list[Tensor], list[bool]]:
    """Parameters after some steps, and which of them stay where the first step was given them."""
    step = fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(data=size), plan, reduction="ordered")
    state = step.init(parameters(seed, size))
    before = _addresses(state)
    for number in range(STEPS):
        state, _ = step(state, torch.arange(2.0 * size) + number)
    return step.params(state), [a == b for a, b in zip(before, _addresses(state), strict=True)]


def _addresses(state: Any) -> list[int]:
    handles = state.handles[:PARAMETERS]
    return [x.data_ptr() if isinstance(x, Tensor) else 0 for x in handles]


def on_ranks(rank: int, size: int, in_pieces: bool, seeds: list[int]) -> list[tuple[list[Tensor], list[bool]]]:
    if in_pieces:
        slots.AT_ONCE, slots.PIECE = 1 << 10, 1 << 8
    return [train(fp.zero(stage, "data"), size, seed) for stage in (1, 2) for seed in seeds]


@pytest.mark.parametrize(("size", "in_pieces"), [(2, False), (2, True), pytest.param(3, True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", [[0, 1], pytest.param([2, 3], marks=pytest.mark.slow)])
def test_parameters_stay_where_they_lie_and_become_what_they_should(
    size: int, in_pieces: bool, seeds: list[int]
) -> None:
    wanted = [train(fp.data_parallel("data"), size, seed)[0] for seed in seeds] * 2
    for found in run_on_processes(on_ranks, size, size, in_pieces, seeds, timeout=300):
        for (params, stayed), reference, seed in zip(found, wanted, seeds * 2, strict=True):
            assert all(map(torch.equal, params, reference)), seed
            even = [any(length % size == 0 for length in shape) for shape in shapes(seed, size)]
            assert [s for s, e in zip(stayed, even, strict=True) if e] == [True] * sum(even), seed


def by_the_backend(rank: int) -> list[tuple[list[Tensor], list[bool]]]:
    return [train(fp.zero(1, "data"), 2, seed) for seed in range(4)]


def test_so_they_do_by_the_backend_which_brings_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTIONAL_PARALLEL_ALGORITHM", "backend")
    wanted = [train(fp.data_parallel("data"), 2, seed)[0] for seed in range(4)]
    for found in run_on_processes(by_the_backend, 2, timeout=300):
        for (params, stayed), reference in zip(found, wanted, strict=True):
            assert all(map(torch.equal, params, reference)) and any(stayed)


def test_a_part_that_lies_where_it_belongs_is_not_written() -> None:
    targets = tuple(torch.arange(4.0) for _ in range(3))
    layout = BucketLayout(2, ((0, (2,), 0), (2, (2,), 0), (4, (2,), 0)), (*targets[:2], None))
    leaves = DirectOutputs(layout, torch.float32, torch.device("cpu"))
    leaves.keep(0, [targets[0][:2], targets[1][:2].clone(), targets[2][:2]])
    leaves.write(0, 0, torch.full((6,), 7.0))
    leaves.write(1, 0, torch.full((6,), 8.0))
    found = [leaves.take(index) for index in range(3)]
    assert found[0] is targets[0] and found[1] is targets[1] and found[2] is not targets[2]
    assert [x.tolist() for x in found] == [[0, 1, 8, 8], [7, 7, 8, 8], [7, 7, 8, 8]]
