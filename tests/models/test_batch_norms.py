"""SyncBatchNorm is batch norm over the global batch, in one process and on ranks; and averages without momentum."""

from __future__ import annotations

from itertools import product
from typing import Any

import optree
import pytest
import torch
import torch.distributed as dist
from torch import nn

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..processes import run_on_processes

PLAN = fp.data_parallel("data", batch=(P(), P("data")))
CASES = list(product((0.1, None), (True, False), (True, False)))  # momentum, track_running_stats, training


def net(momentum: float | None, track: bool, training: bool, synchronised: bool = True) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=momentum, track_running_stats=track)
    module: nn.Module = nn.Sequential(nn.Conv2d(2, 3, 3), norm, nn.ReLU(), nn.BatchNorm2d(3, affine=False))
    module = nn.SyncBatchNorm.convert_sync_batchnorm(module) if synchronised else module
    return module.double().train(training)


def images(seed: int) -> torch.Tensor:
    return torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(seed)).double()


def two_steps(module: nn.Module, mesh: Mesh | None) -> list[Any]:
    """Gradients, losses and running statistics of two batches, under a plan or of the plain function."""
    fn, params, state = fp.functional(module, buffers=True)

    def loss(params: Any, state: Any, x: torch.Tensor) -> Any:
        result, new = fn(params, state, x)
        return (result**2).mean(), new

    step: Any = fp.grad_and_value(loss, has_aux=True)
    if mesh is not None:
        step = fp.compile(fp.grad_and_value(PLAN(loss), has_aux=True), mesh)
    found: list[Any] = []
    for seed in (0, 1):
        gradients, (value, state) = step(params, state, images(seed))
        found.append((gradients, value, state))
    return found


def of_torch(momentum: float | None, track: bool, training: bool) -> list[Any]:
    """What an ordinary batch norm computes on one device."""
    module, found = net(momentum, track, training, synchronised=False), []
    for seed in (0, 1):
        module.zero_grad()
        value = (module(images(seed)) ** 2).mean()
        value.backward()
        gradients = {path: parameter.grad.clone() for path, parameter in module.named_parameters()}
        found.append((gradients, value.detach(), {path: x.clone() for path, x in module.named_buffers()}))
    return found


@pytest.mark.parametrize(("momentum", "track", "training"), CASES)
@pytest.mark.parametrize("synchronised", [True, False], ids=["SyncBatchNorm", "BatchNorm"])
def test_it_is_batch_norm_over_the_global_batch(
    synchronised: bool, momentum: float | None, track: bool, training: bool
) -> None:
    found = two_steps(net(momentum, track, training, synchronised), Mesh(data=2))
    torch.testing.assert_close(found, of_torch(momentum, track, training), rtol=1e-11, atol=1e-13)


def on_a_rank(rank: int) -> list[Any]:
    found = [two_steps(net(*case), Mesh(data=2)) for case in CASES]
    eager = two_steps(net(0.1, True, True), None)
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        net(0.1, True, True)(images(0))  # outside fp.functional the module is torch's own
    assert nn.SyncBatchNorm.forward.__module__.startswith("torch.") and "forward" not in vars(nn.BatchNorm2d)
    return [found, eager, refusal()]


def refusal() -> str:
    group = dist.new_group([0])
    module = nn.Sequential(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3), group))
    with pytest.raises(ValueError, match=r"process_group=, but a function") as caught:
        fp.functional(module)
    fp.functional(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3), dist.group.WORLD))
    return str(caught.value)


def test_on_ranks_it_is_the_same() -> None:
    wanted = [of_torch(*case) for case in CASES]
    for found, eager, refused in run_on_processes(on_a_rank, 2):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(eager, wanted[0], rtol=1e-11, atol=1e-13)
        assert "a function has no ranks: 0." in refused


def test_no_plan_averages_as_well() -> None:
    found: list[Any] = []
    module = net(None, True, True)
    fn, params, state = fp.functional(module, buffers=True)
    step = fp.compile(
        fp.grad_and_value(lambda p, s, x: ((fn(p, s, x)[0] ** 2).mean(), fn(p, s, x)[1]), has_aux=True),
        Mesh(),
        in_specs=(P(), P(), P()),
        out_specs=P(),
    )
    for seed in (0, 1):
        gradients, (value, state) = step(params, state, images(seed))
        found.append((gradients, value, state))
    torch.testing.assert_close(found, of_torch(None, True, True), rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("statistics", [P(), P("tensor")], ids=["replicated", "sharded"])
@pytest.mark.parametrize("training", [False, True])
def test_channels_are_split_without_a_collective(statistics: P, training: bool) -> None:
    """The only sum is that of the loss."""

    def loss(params: dict[str, torch.Tensor], running: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        own = None if training else running
        mean, var = (None, None) if own is None else (own["mean"], own["var"])
        h = nn.functional.batch_norm(x @ params["w"], mean, var, params["g"], params["b"], training, 0.0)
        return h.square().mean() + h[0].sum()

    torch.manual_seed(0)
    params = {"w": torch.randn(4, 6), "g": torch.randn(6), "b": torch.randn(6)}
    params = {name: each.double() for name, each in params.items()}
    running, x = {"mean": torch.randn(6).double(), "var": torch.rand(6).double() + 1}, torch.randn(8, 4).double()
    specs = ({"w": P(None, "tensor"), "g": P("tensor"), "b": P("tensor")}, statistics, P())
    step = fp.compile(fp.grad_and_value(fp.partition(loss, "tensor", specs, P())), Mesh(tensor=2))
    found = step(params, running, x)
    for mine, wanted in zip(
        *map(optree.tree_leaves, (found, fp.grad_and_value(loss)(params, running, x))), strict=True
    ):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
    assert step.program.counts() == {("psum", ("tensor",)): 1}


NORMS = {
    "torch.native_batch_norm": lambda x, w, b, mean, var: torch.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5)[
        0
    ],
    "torch.batch_norm": lambda x, w, b, mean, var: torch.batch_norm(x, w, b, mean, var, True, 0.1, 1e-5, False),
    "F.instance_norm": lambda x, w, b, mean, var: nn.functional.instance_norm(x, mean, var, w, b),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("split", [P("data"), P(None, None, "data")], ids=["samples", "columns"])
def test_ops_below_the_function_write_running_statistics_too(name: str, split: P) -> None:
    """`native_batch_norm` writes into them without a word in its schema."""

    def loss(params: dict[str, torch.Tensor], mean: torch.Tensor, var: torch.Tensor, x: torch.Tensor) -> Any:
        mean, var = mean.clone(), var.clone()
        return NORMS[name](x, params["g"], params["b"], mean, var).square().sum(), (mean, var)

    torch.manual_seed(0)
    params = {"g": torch.randn(3).double(), "b": torch.randn(3).double()}
    args = (params, torch.randn(3).double(), torch.rand(3).double(), torch.randn(4, 3, 6).double())
    partitioned = fp.partition(loss, "data", (P(), P(), P(), split), P())
    found = fp.compile(fp.grad_and_value(partitioned, has_aux=True), Mesh(data=2))(*args)
    wanted = torch.func.grad_and_value(loss, has_aux=True)(*args)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-13)
