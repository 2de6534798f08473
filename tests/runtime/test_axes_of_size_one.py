"""Mesh axes with one rank on real processes: every subset of axes has a process group, wherever the axis is."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, SimulatedRuntime, use_runtime
from sharding_specs import Mesh, P
from tests.processes import run_on_processes

NAMES = ("a", "b", "c", "d", "e")
MESHES = {
    1: [Mesh(pipe=1), Mesh(a=1, b=1)],
    2: [Mesh(dict(zip(NAMES, sizes, strict=False))) for sizes in ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 1, 2))],
    4: [Mesh(dict(zip(NAMES, sizes, strict=False))) for sizes in sorted(set(itertools.permutations((2, 2, 1, 1))))],
}
X = torch.arange(32, dtype=torch.float64).reshape(8, 4) % 5


# -----------------------------------------------------------------------------
# Functions that the ranks run
# -----------------------------------------------------------------------------


def sums(mesh: Mesh) -> list[torch.Tensor]:
    """Sums over every subset of the axes; of two subsets, the second has its axes in reverse."""
    found = []
    for count in range(1, len(mesh.axis_names) + 1):
        for number, axes in enumerate(itertools.combinations(mesh.axis_names, count)):
            order = axes[:: -1 if number % 2 else 1]
            total = fp.shard_map(mesh, in_specs=P(order), out_specs=P())(lambda x, over=order: fp.psum(x, over))
            found.append(total(X))
    return found


def trained(mesh: Mesh, plan: Any) -> list[torch.Tensor]:
    params = {"layers": [torch.eye(4, dtype=torch.float64) * (1 + layer) for layer in range(2)]}
    train = fp.train_step(loss, fp.optim.sgd(0.01), mesh, plan)
    state, _ = train(train.init(params), X)
    return train.params(state)["layers"]


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params["layers"]:
        x = torch.tanh(x @ w)
    return (x**2).mean()


def plans(size: int) -> list[tuple[Mesh, Any]]:
    """Plans in which some axes, the pipeline's among them, have one rank."""
    pipeline = fp.pipeline("pipe", schedule="1f1b", microbatches=2)
    data = fp.zero(3, "data")
    both = fp.chain(data, pipeline)
    return [
        (Mesh(pipe=1, data=size), both),
        (Mesh(data=size, pipe=1), both),
        (Mesh(pipe=size, data=1), both),
        (Mesh(pipe=size), pipeline),
    ]


def on_ranks(rank: int, size: int) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    for mesh in [*MESHES[size], *(mesh for mesh, _ in plans(size))]:
        use_runtime(ProcessRuntime(mesh, reduction="ordered", timeout=60))
    return everything(size)


def everything(size: int) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    return [sums(mesh) for mesh in MESHES[size]], [trained(mesh, plan) for mesh, plan in plans(size)]


# -----------------------------------------------------------------------------
# Laws
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.every(2)
def test_axes_with_one_rank_have_a_group(size: int) -> None:
    for mesh in [*MESHES[size], *(mesh for mesh, _ in plans(size))]:
        use_runtime(SimulatedRuntime(mesh))
    want_sums, want_params = everything(size)
    for got_sums, got_params in run_on_processes(on_ranks, size, size):
        for got, want in zip([*got_sums, *got_params], [*want_sums, *want_params], strict=True):
            assert all(map(torch.equal, got, want))


def groups_over(rank: int) -> list[tuple[Mesh, tuple[str, ...], tuple[int, ...]]]:
    """Return the ranks of every collective's group, on this rank, for every order of some axes."""
    found = []
    for mesh in MESHES[4]:
        groups = ProcessRuntime(mesh, timeout=60).communicator._groups
        for count in range(1, len(mesh.axis_names) + 1):
            for axes in itertools.permutations(mesh.axis_names, count):
                found.append((mesh, axes, groups.over(axes).ranks))
    return found


def test_axes_with_one_rank_do_not_change_the_group_of_the_others() -> None:
    for rank, found in enumerate(run_on_processes(groups_over, 4)):
        for mesh, axes, ranks in found:
            assert list(ranks) == next(list(each) for each in mesh.groups(axes) if rank in each), (mesh, axes)
