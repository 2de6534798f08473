"""Law 4: a sample of the laws on real gloo processes, and on the vmap oracle."""

from __future__ import annotations

import random

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P, shard, unshard

from ..processes import run_on_processes
from .random_functions import STEPS, Program, arguments

SPECS = [P(), P("tensor"), P(None, "tensor"), P(None, (2, "tensor"))]


def sample(seed: int) -> tuple[Program, dict[str, P], int]:
    """A random function with random specs and a ZeRO stage."""
    draw = random.Random(seed)
    steps = tuple((draw.choice(sorted(STEPS)), draw.randrange(6), draw.randrange(3)) for _ in range(4))
    return Program(steps), {f"w{index}": draw.choice(SPECS) for index in range(3)}, draw.randrange(4)


def check_laws(rank: int, mesh: Mesh, seeds: range) -> int:
    """Value and gradient of every sample, exactly; on every process."""
    for seed in seeds:
        f, specs, stage = sample(seed)
        plan = fp.chain(fp.tensor_parallel("tensor", specs), fp.zero(stage, "data"), fp.accumulate(1 + seed % 2))
        fp.testing.assert_equivalent(f, plan, mesh, *arguments(seed), exact=True)
    return len(seeds)


@pytest.mark.parametrize("mesh", [Mesh(data=1, tensor=2), Mesh(data=2, tensor=2)], ids=str)
def test_a_sample_on_processes(mesh: Mesh) -> None:
    results = run_on_processes(check_laws, mesh.size, mesh, range(12), timeout=240)
    assert results == [12] * mesh.size


@pytest.mark.parametrize("seed", range(6))
def test_a_sample_on_the_vmap_oracle(seed: int) -> None:
    """Each rank's gradients as a slice of a mapped dim: the same local function under fp.vmap."""
    f, specs, _ = sample(seed)
    mesh, (params, x) = Mesh(tensor=2), arguments(seed)
    local = fp.tensor_parallel("tensor", specs)(f)
    whole = fp.compile(fp.grad(local), mesh)(params, x)

    def body(params: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
        return fp.grad(local)(params, x)

    parts = [shard(params, specs, mesh, rank) for rank in mesh.ranks]
    stacked = {name: torch.stack([part[name] for part in parts]) for name in params}
    mapped = fp.vmap(body, in_dims=(0, None), axis_name="tensor")(stacked, x)
    by_rank = [{name: mapped[name][rank] for name in mapped} for rank in mesh.ranks]
    joined = unshard(by_rank, specs, mesh)
    assert all(torch.equal(joined[name], whole[name]) for name in params)
