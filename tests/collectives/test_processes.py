"""Real processes hold what the group's meaning says, forward and backward, and fail loudly: on gloo and under mpirun.

Starting processes is slow: they are started once per mesh, and each check reads the results it is about.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_parallel import collectives as fp
from functional_parallel.collectives import reference
from functional_parallel.errors import CollectiveError
from functional_parallel.runtime import communicator
from sharding_specs import Mesh
from tests.mpirun import run_under_mpirun
from tests.processes import RankError, run_on_processes

from .cases import CASES, Case, I, R, integers

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SQUARE = {"a": 2, "b": 2}
AXES = [("a",), ("b",), ("a", "b"), ("b", "a")]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int16, torch.complex64, torch.bool]
SHAPE = (4, 8)


def value_of(rank: int, seed: int = 0) -> Tensor:
    return integers(*SHAPE, seed=100 * seed + rank)


def operand(case: Case, ranks: list[int], rank: int) -> Tensor:
    """An Invariant operand is the same for all ranks of a group: that of its first."""
    return value_of(ranks[0] if case.takes in (I, R) else rank)


def group_of(rank: int, axes: tuple[str, ...]) -> list[int]:
    return next(ranks for ranks in Mesh(**SQUARE).groups(axes) if rank in ranks)


def loss(x: Tensor) -> Tensor:
    """A cubic loss through most primitives, over both axes."""
    x = fp.all_gather(fp.psum_scatter(x * x, "a", 1), "b", 0)
    x = fp.all_to_all(fp.ppermute(x, ("b", "a"), [(0, 1), (1, 3), (3, 0)]), "b", 0, 1)
    return fp.psum((x * fp.pvary(fp.psum(x, "a"), "a")).sum() * (fp.axis_index("b") + 1), ("a", "b"))


def derivatives(x: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    gradient = torch.func.grad(loss)
    second = torch.func.grad(lambda at: fp.psum((gradient(at) * v).sum(), ("a", "b")))(x)
    tangent = torch.func.jvp(gradient, (x,), (v,))[1]
    samples = torch.func.vmap(gradient)(torch.stack([x, v]))
    return gradient(x), second, tangent, samples


# ---------------------------------------------------------------------------------------------------------------------
# What the ranks run
# ---------------------------------------------------------------------------------------------------------------------


def on_four_ranks(rank: int) -> dict[Any, Any]:
    carriers = {reduction: communicator(Mesh(**SQUARE), reduction=reduction) for reduction in ("fast", "ordered")}
    results: dict[Any, Any] = {}
    for (reduction, carrier), axes in product(carriers.items(), AXES):
        with carrier.bound():
            for case in CASES:
                results[reduction, axes, str(case)] = case.apply(operand(case, group_of(rank, axes), rank), axes)
            for dtype in DTYPES:
                results[reduction, axes, dtype] = collectives_of(value_of(rank).to(dtype), axes)
            results[reduction, axes, "floats"] = fp.psum(value_of(rank) / 7, axes)
    with carriers["fast"].bound():
        results["derivatives"] = derivatives(value_of(rank), value_of(rank, seed=1))
        leaf = value_of(rank).requires_grad_()
        result = loss(leaf)
    results["backward after the binding"] = torch.autograd.grad(result, leaf)[0]
    return results


def collectives_of(x: Tensor, axes: tuple[str, ...]) -> list[Tensor]:
    results = [fp.psum(x, axes), fp.all_gather(x, axes), fp.psum_scatter(counted(x), axes)]
    return results if x.is_complex() else [*results, fp.pmax(x, axes), fp.pmin(x, axes)]


def counted(x: Tensor) -> Tensor:
    return x.to(torch.int64) if x.dtype == torch.bool else x


def on_two_ranks(rank: int) -> dict[Any, Any]:
    mesh = Mesh(a=2)
    results: dict[Any, Any] = {}
    for reduction in ("fast", "ordered"):
        with communicator(mesh, reduction=reduction).bound():
            for case in CASES:
                results[reduction, str(case)] = case.apply(operand(case, [0, 1], rank), ("a",))
            for dtype in DTYPES:
                results[reduction, dtype] = collectives_of(value_of(rank).to(dtype), ("a",))
    with communicator(mesh).bound():
        results["empty"] = fp.all_gather(torch.ones(0, 3), "a"), fp.psum(torch.ones(0), "a")
        ignored = torch.func.grad(lambda y: y.sum() + (0 if rank else 1) * fp.all_gather(y, "a").sum())
        results["ignored"] = ignored(torch.ones(2))
    for algorithm in ("auto", "backend", "shared"):
        with communicator(mesh, algorithm=algorithm).bound():
            results["extremes", algorithm] = [(fp.pmax(x, "a"), fp.pmin(x, "a")) for x in extremes(rank)]
    with communicator(mesh, timeout=timedelta(seconds=1)).bound():
        results["alone"] = error_of_a_gradient(rank)
    return results


def extremes(rank: int) -> list[Tensor]:
    """Few values, which are gathered: none, a transposed matrix; many, which are not; and of each some NaN."""
    few, many = value_of(rank), integers((1 << 17) + 1, seed=rank)
    return [few, few[:0], few.t(), with_nan(few, rank), many.view(1, -1), with_nan(many, rank)]


def with_nan(x: Tensor, rank: int) -> Tensor:
    """NaN on one rank of two, on the other, on both, and on none, in turn."""
    return torch.where(torch.arange(x.numel()).view(x.shape) % 4 & (rank + 1) > 0, torch.nan, x)


def error_of_a_gradient(rank: int) -> str:
    """Rank 1 drops what it gathered, so autograd never calls its backward, and rank 0 waits for it in vain."""

    def loss_of_rank(x: Tensor) -> Tensor:
        gathered = fp.all_gather(x, "a")
        return gathered.sum() if rank == 0 else x.sum()

    try:
        torch.func.grad(loss_of_rank)(torch.ones(2, 3))
    except CollectiveError as error:
        return str(error)
    return "no error"


def on_the_wrong_number(rank: int) -> None:
    communicator(Mesh(a=3))


# ---------------------------------------------------------------------------------------------------------------------
# What must hold
# ---------------------------------------------------------------------------------------------------------------------


LAUNCHERS = {"gloo": run_on_processes, "mpi4py": run_under_mpirun}


@pytest.fixture(scope="module", params=["gloo", pytest.param("mpi4py", marks=pytest.mark.slow)])
def four(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return LAUNCHERS[request.param](on_four_ranks, 4)


@pytest.fixture(scope="module", params=LAUNCHERS)
def launcher(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def two(launcher: str) -> list[dict[Any, Any]]:
    return LAUNCHERS[launcher](on_two_ranks, 2)


@pytest.mark.parametrize("reduction, axes", list(product(["fast", "ordered"], AXES)), ids=str)
def test_every_collective(four: list[dict[Any, Any]], reduction: str, axes: tuple[str, ...]) -> None:
    for case, ranks in product(CASES, Mesh(**SQUARE).groups(axes)):
        expected = case.reference([operand(case, ranks, rank) for rank in ranks])
        for rank, value in zip(ranks, expected, strict=True):
            assert torch.equal(four[rank][reduction, axes, str(case)], value), f"{case} over {axes} on rank {rank}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(four: list[dict[Any, Any]], dtype: torch.dtype) -> None:
    for reduction, axes in product(["fast", "ordered"], AXES):
        for ranks in Mesh(**SQUARE).groups(axes):
            assert_meaning([four[rank][reduction, axes, dtype] for rank in ranks], ranks, dtype)


def assert_meaning(found: list[list[Tensor]], ranks: list[int], dtype: torch.dtype) -> None:
    values = [value_of(rank).to(dtype) for rank in ranks]
    summed = [counted(value) for value in values]
    expected = [reference.psum(summed), reference.all_gather(values, 0), reference.psum_scatter(summed, 0)]
    if not dtype.is_complex:
        expected += [reference.pmax(values), reference.pmin(values)]
    for position, results in enumerate(found):
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours, theirs[position]) and ours.dtype == theirs[position].dtype


def test_every_collective_and_dtype_on_two_ranks(two: list[dict[Any, Any]]) -> None:
    for reduction in ("fast", "ordered"):
        for case in CASES:
            expected = case.reference([operand(case, [0, 1], rank) for rank in (0, 1)])
            for result, value in zip(two, expected, strict=True):
                assert torch.equal(result[reduction, str(case)], value), case
        for dtype in DTYPES:
            assert_meaning([result[reduction, dtype] for result in two], [0, 1], dtype)


def test_ordered_sums_add_in_rank_order_to_the_bit(four: list[dict[Any, Any]]) -> None:
    for axes in AXES:
        for ranks in Mesh(**SQUARE).groups(axes):
            expected = reference.psum([value_of(rank) / 7 for rank in ranks])[0]
            assert all(torch.equal(four[rank]["ordered", axes, "floats"], expected) for rank in ranks)
            fast = [four[rank]["fast", axes, "floats"] for rank in ranks]
            torch.testing.assert_close(fast[0], expected)
            assert all(torch.equal(fast[0], other) for other in fast), "an Invariant value is the same to the bit"


def test_derivatives_equal_the_oracles(four: list[dict[Any, Any]]) -> None:
    x, v = (torch.stack([value_of(rank, seed) for rank in range(4)]).unflatten(0, (2, 2)) for seed in (0, 1))
    oracle = fp.vmap(fp.vmap(derivatives, axis_name="b"), axis_name="a")(x, v)
    for rank, result in enumerate(four):
        for ours, truth in zip(result["derivatives"], oracle, strict=True):
            assert torch.equal(ours, truth.flatten(0, 1)[rank])
        assert torch.equal(result["backward after the binding"], oracle[0].flatten(0, 1)[rank])


@pytest.mark.parametrize("algorithm", ["auto", "backend", "shared"])
def test_the_largest_and_the_smallest_of_few_and_of_many(two: list[dict[Any, Any]], algorithm: str) -> None:
    for index, values in enumerate(zip(extremes(0), extremes(1), strict=True)):
        for result in two:
            for ours, among in zip(result["extremes", algorithm][index], (torch.maximum, torch.minimum), strict=True):
                torch.testing.assert_close(ours, among(*values), rtol=0, atol=0, equal_nan=True)


def test_empty_tensors_travel(two: list[dict[Any, Any]]) -> None:
    for result in two:
        gathered, summed = result["empty"]
        assert gathered.shape == (0, 3) and summed.shape == (0,)


def test_a_zero_cotangent_still_takes_part(two: list[dict[Any, Any]]) -> None:
    """Rank 1's loss multiplies the gathered value by zero; its backward joins the reduce-scatter all the same."""
    assert [result["ignored"].tolist() for result in two] == [[2.0, 2.0], [2.0, 2.0]]


def test_a_rank_left_alone_says_so(two: list[dict[Any, Any]], launcher: str) -> None:
    message = two[0]["alone"]
    assert "rank 0 (a=0): psum_scatter over ('a',) of float32[4, 3] failed" in message
    if launcher == "gloo":
        assert "rank 1 (a=1) failed. torch says: " in message and "timeout" not in message
    else:  # no connection of MPI is closed, but the watch knows that rank 1 has ended
        assert "rank 1 (a=1)" in message and "torch says: timed out after 1.0 s" in message


def test_the_mesh_must_fit_the_processes() -> None:
    with pytest.raises(RankError, match="has 3 ranks, but 1 processes are running; start 3, change the mesh, or name"):
        run_on_processes(on_the_wrong_number, 1)
