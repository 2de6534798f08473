"""What torch gets silently wrong when collectives meet function transforms, and what this library does instead.

Each test shows torch's answer first, with the truth beside it, so that a torch which learns better shows up here.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from functional_parallel import collectives as fp
from functional_parallel import errors
from functional_parallel.collectives import reference
from functional_parallel.runtime import communicator
from sharding_specs import Mesh
from tests.processes import run_on_processes

# ---------------------------------------------------------------------------------------------------------------------
# What the ranks run: torch's way, ours, and whether torch's way is refused under our guard
# ---------------------------------------------------------------------------------------------------------------------


def in_place(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def functional(x: Tensor) -> Tensor:
    from torch.distributed import _functional_collectives as functional_collectives

    return functional_collectives.all_reduce(x, "sum", dist.group.WORLD)


def ours(x: Tensor) -> Tensor:
    return fp.pvary(fp.psum(x, "i"), "i")


def on_two_ranks(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    x = torch.tensor([1.0, 2.0]) + rank
    results: dict[str, Any] = {"ddp": gradient_of_ddp(rank)}
    with communicator(Mesh(i=2)).bound():
        for name, collective in {"in_place": in_place, "functional": functional, "ours": ours}.items():
            results[name] = answers(collective, x, weight=rank + 1)
    return results


def answers(collective: Callable[[Tensor], Tensor], x: Tensor, weight: int) -> dict[str, Any]:
    """Derivatives of a loss to which every rank adds its own share."""
    share = lambda x: weight * (collective(x * x) ** 2).sum()  # noqa: E731
    transforms = {
        "value": lambda: collective(x * x),
        "grad": lambda: torch.func.grad(share)(x),
        "jvp": lambda: torch.func.jvp(collective, (x,), (torch.ones(2),))[1],
        "vmap": lambda: torch.func.vmap(collective)(x),
    }
    return {name: (outcome(run), refusal(run)) for name, run in transforms.items()}


def outcome(run: Callable[[], Tensor]) -> Tensor | str:
    try:
        return run().detach().clone()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Guard(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fp.check_op(func)
        return func(*args, **(kwargs or {}))


def refusal(run: Callable[[], Tensor]) -> str:
    """The message under our guard, or nothing; then no rank has sent anything."""
    try:
        with Guard():
            run()
    except errors.ForeignCollectiveError as error:
        return str(error)
    except Exception as error:
        return f"torch: {error}"
    return ""


def gradient_of_ddp(rank: int) -> dict[str, Any]:
    module = nn.Linear(1, 1, bias=False)
    nn.init.ones_(module.weight)
    ddp = DistributedDataParallel(module)
    x = torch.tensor([[1.0 + rank]])

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(ddp, parameters, (x,)).sum()

    parameters = {name: parameter.detach() for name, parameter in ddp.named_parameters()}
    gradient = torch.func.grad(loss)(parameters)
    message = ""
    try:
        fp.check_callable(loss)
    except errors.ForeignCollectiveError as error:
        message = str(error)
    return {"gradient": next(iter(gradient.values())).item(), "refusal": message}


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_on_processes(on_two_ranks, 2)


# ---------------------------------------------------------------------------------------------------------------------
# What must hold. x is [1, 2] and [2, 3], so psum(x²) = [5, 13], and d/dx of (1 + 2) Σ psum(x²)² is 12 x psum(x²).
# ---------------------------------------------------------------------------------------------------------------------

TRUTH = {
    "value": [[5.0, 13.0], [5.0, 13.0]],
    "grad": [[60.0, 312.0], [120.0, 468.0]],
    "jvp": [[2.0, 2.0], [2.0, 2.0]],
    "vmap": [[3.0, 5.0], [3.0, 5.0]],
}


def is_right(two: list[dict[str, Any]], name: str, transform: str) -> bool:
    found = [rank[name][transform][0] for rank in two]
    return all(isinstance(x, Tensor) and x.tolist() == truth for x, truth in zip(found, TRUTH[transform], strict=True))


@pytest.mark.parametrize("transform", TRUTH)
def test_ours_are_right(two: list[dict[str, Any]], transform: str) -> None:
    assert is_right(two, "ours", transform), two[0]["ours"][transform]
    assert two[0]["ours"][transform][1] == "", "our own collectives pass the guard"


@pytest.mark.parametrize("name, transform", [("in_place", "grad"), ("in_place", "jvp"), ("functional", "jvp")])
def test_torchs_are_silently_wrong_and_refused(two: list[dict[str, Any]], name: str, transform: str) -> None:
    assert is_right(two, name, "value")
    assert isinstance(two[0][name][transform][0], Tensor), "silently: no error"
    assert not is_right(two, name, transform)
    assert "write fp.psum(x, axis) instead" in two[0][name][transform][1]


@pytest.mark.parametrize("name, transform", [("in_place", "vmap"), ("functional", "vmap"), ("functional", "grad")])
def test_torchs_are_refused_where_torch_may_raise(two: list[dict[str, Any]], name: str, transform: str) -> None:
    message = two[0][name][transform][1]
    assert "write fp.psum(x, axis) instead" in message or message.startswith("torch: ")


def test_a_ddp_module_keeps_its_gradients_local_and_is_refused(two: list[dict[str, Any]]) -> None:
    assert [rank["ddp"]["gradient"] for rank in two] == [1.0, 2.0], "the mean, 1.5, would be right"
    assert "holds a DistributedDataParallel module" in two[0]["ddp"]["refusal"]
    assert "fp.data_parallel" in two[0]["ddp"]["refusal"]


# ---------------------------------------------------------------------------------------------------------------------
# Without processes
# ---------------------------------------------------------------------------------------------------------------------


class DataParallelLookalike(nn.Module):
    """Named like torch's, but not torch's."""


DataParallelLookalike.__name__ = "DataParallel"


class Wrapper(nn.Module):
    """A module that hides another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor) -> Tensor:
        return self.inner(x).sum()


@pytest.mark.parametrize(
    "hide",
    [
        lambda module: module,
        lambda module: Wrapper(module),
        lambda module: Wrapper(module).loss,
        lambda module: lambda x: module(x),
        lambda module: functools.partial(torch.func.functional_call, module),
        lambda module: functools.partial(lambda x, fn: fn(x), fn=lambda x: module(x)),
    ],
    ids=["itself", "inside", "bound", "closure", "partial", "partial of a closure"],
)
def test_parallel_modules_are_found_wherever_they_hide(hide: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(errors.ForeignCollectiveError, match=r"Pass the module inside it to fp\.functional"):
        fp.check_callable(hide(nn.DataParallel(nn.Linear(2, 2))))
    fp.check_callable(hide(nn.Linear(2, 2)))
    fp.check_callable(hide(DataParallelLookalike()))


@pytest.mark.parametrize(
    "op, fix",
    [
        (torch.ops.c10d.allreduce_.default, "fp.psum"),
        (torch.ops.c10d._reduce_scatter_base_.default, "fp.psum_scatter"),
        (torch.ops.c10d.allgather_.default, "fp.all_gather"),
        (torch.ops.c10d.alltoall_base_.default, "fp.all_to_all"),
        (torch.ops.c10d.broadcast_.default, "fp.broadcast"),
        (torch.ops.c10d.send.default, "fp.send"),
        (torch.ops.c10d.barrier.default, "nothing"),
        (torch.ops._c10d_functional.all_reduce.default, "fp.psum"),
        (torch.ops._c10d_functional.wait_tensor.default, "nothing"),
    ],
    ids=str,
)
def test_every_op_of_torch_distributed_has_a_fix(op: Any, fix: str) -> None:
    with pytest.raises(errors.ForeignCollectiveError, match=f"write {fix}"):
        fp.check_op(op)


def test_our_ops_and_ordinary_ones_pass() -> None:
    fp.check_op(torch.ops.aten.mm.default)
    fp.check_op(torch.ops.fp.psum.default)


def test_a_generated_vmap_rule_would_be_wrong() -> None:
    """It maps the forward itself: over the axis's own level, or any other, the collective runs on one entry alone."""

    class Generated(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return reference.psum([x])[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    x = torch.tensor([1.0, 2.0, 3.0])
    generated = torch.func.vmap(Generated.apply)(x)
    assert torch.equal(generated, x), "every entry summed alone"
    assert torch.equal(fp.vmap(lambda x: fp.psum(x, "i"), axis_name="i")(x), torch.full((3,), 6.0))
