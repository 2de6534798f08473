"""Real processes hold what the group's meaning says, forward and backward, and fail loudly.

Starting processes is slow, so each test starts them once and collects many results.
"""

from __future__ import annotations

import time
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from functional_parallel import collectives as fp
from functional_parallel.collectives import group
from functional_parallel.runtime.process_carrier import CollectiveError, ProcessCarrier
from sharding_specs import Mesh
from tests.processes import RankError, run_on_processes

from .cases import CASES, I, R, V, integers

MESHES = {2: {"a": 2}, 4: {"a": 2, "b": 2}}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.complex64, torch.bool]
SHAPE = (4, 8)


def axes_of(shape: dict[str, int]) -> list[tuple[str, ...]]:
    return [("a",)] if len(shape) == 1 else [("a",), ("b",), ("a", "b"), ("b", "a")]


def value_of(rank: int, seed: int = 0) -> Tensor:
    return integers(*SHAPE, seed=100 * seed + rank)


def operand(case: Any, rank: int, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """An Invariant operand is the same for all ranks of a group: the one of the group's first rank."""
    first = next(ranks for ranks in mesh.groups(axes) if rank in ranks)[0]
    return value_of(first if case.takes in (I, R) else rank)


# ---------------------------------------------------------------------------------------------------------------------
# What runs on each rank
# ---------------------------------------------------------------------------------------------------------------------


def every_collective(rank: int, shape: dict[str, int], reduction: str) -> dict[str, Any]:
    mesh = Mesh(**shape)
    carrier = ProcessCarrier(mesh, reduction=reduction)
    results: dict[Any, Any] = {}
    with carrier.bound():
        for case, axes in product(CASES, axes_of(shape)):
            x = operand(case, rank, mesh, axes)
            results[str(case), axes] = case.apply(x, axes)
        for dtype, axes in product(DTYPES, axes_of(shape)):
            x = value_of(rank).to(dtype)
            results[dtype, axes] = fp.psum(x, axes), fp.all_gather(x, axes), fp.all_to_all(x, axes, 0, 1)
            if not dtype.is_complex:
                results[dtype, axes] += fp.pmax(x, axes), fp.pmin(x, axes)
    return results


def derivatives(rank: int, shape: dict[str, int]) -> tuple[Tensor, ...]:
    """Of one loss that goes through most primitives: gradient, its own gradient, tangent, per-sample gradients."""
    with ProcessCarrier(Mesh(**shape)).bound():
        x, v = value_of(rank), value_of(rank, seed=1)
        gradient = torch.func.grad(loss)
        second = torch.func.grad(lambda at: fp.psum((gradient(at) * v).sum(), ("a", "b")))(x)
        tangent = torch.func.jvp(gradient, (x,), (v,))[1]
        samples = torch.func.vmap(gradient)(torch.stack([x, v]))
        leaf = x.clone().requires_grad_()
        plain = torch.autograd.grad(loss(leaf), leaf)[0]
    after = torch.autograd.grad(outside := second_use(shape, leaf), leaf)[0]
    return gradient(x) if False else plain, second, tangent, samples, after, outside.detach()


def no_second_carrier() -> None: ...


# ---------------------------------------------------------------------------------------------------------------------
