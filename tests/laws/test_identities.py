"""The identities between collectives, as users write them: in types, values and gradients, on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.testing import strategies
from functional_parallel.testing.compare import compare
from sharding_specs import Mesh, P

RANKS = st.integers(2, 5)


def values(ranks: int, rows: int = 1) -> torch.Tensor:
    """For each rank `rows · ranks` rows of two numbers."""
    count = ranks * ranks * rows
    return torch.arange(2.0 * count, dtype=torch.float64).reshape(count, 2) % 7


def same(f, g, ranks: int) -> None:  # type: ignore[no-untyped-def]
    fp.testing.assert_same(f, g, Mesh(i=ranks), (P("i"),), (values(ranks),))


@settings(max_examples=8)
@given(ranks=RANKS)
def test_all_reduce_is_reduce_then_broadcast(ranks: int) -> None:
    same(lambda x: fp.psum(x, "i"), lambda x: fp.broadcast(fp.reduce(x, "i", 1), "i", 1), ranks)


@settings(max_examples=8)
@given(ranks=RANKS)
def test_all_reduce_is_reduce_scatter_then_all_gather(ranks: int) -> None:
    same(lambda x: fp.psum(x, "i"), lambda x: fp.all_gather(fp.psum_scatter(x, "i"), "i", to="invariant"), ranks)


@settings(max_examples=8)
@given(ranks=RANKS)
def test_all_gather_is_gather_then_broadcast(ranks: int) -> None:
    same(lambda x: fp.all_gather(x, "i", to="invariant"), lambda x: fp.broadcast(fp.gather(x, "i", 0), "i", 0), ranks)


@settings(max_examples=4)
@given(ranks=RANKS, root=st.integers(0, 1))
def test_scatter_of_gather_is_the_identity(ranks: int, root: int) -> None:
    same(lambda x: fp.scatter(fp.gather(x, "i", root), "i", root), lambda x: x * 1, ranks)


@settings(max_examples=8)
@given(ranks=RANKS)
def test_all_to_all_twice_is_the_identity(ranks: int) -> None:
    same(lambda x: fp.all_to_all(fp.all_to_all(x, "i", 0, 1), "i", 1, 0), lambda x: x * 1, ranks)


@settings(max_examples=8)
@given(ranks=RANKS)
def test_a_ring_walked_round_is_the_identity(ranks: int) -> None:
    def around(x: torch.Tensor) -> torch.Tensor:
        for _ in range(ranks):
            x = fp.ppermute(x, "i", [(r, (r + 1) % ranks) for r in range(ranks)])
        return x

    same(around, lambda x: x * 1, ranks)


@settings(max_examples=8)
@given(ranks=RANKS)
def test_a_ring_of_sums_is_all_reduce(ranks: int) -> None:
    """The textbook's all-reduce, naive form: pass on, add up."""

    def ring(x: torch.Tensor) -> torch.Tensor:
        total = passed = x
        for _ in range(ranks - 1):
            passed = fp.ppermute(passed, "i", [(r, (r + 1) % ranks) for r in range(ranks)])
            total = total + passed
        return total

    same(ring, lambda x: fp.pvary(fp.psum(x, "i"), "i"), ranks)


@settings(max_examples=8)
@given(ranks=RANKS)
def test_a_postponed_sum_is_the_sum(ranks: int) -> None:
    """Unreduced now, summed later: linear ops may stand between."""
    same(
        lambda x: fp.psum(fp.pcast(x, "i", to="unreduced") * 3, "i"),
        lambda x: fp.psum(x * 3, "i"),
        ranks,
    )


@settings(max_examples=8)
@given(data=st.data())
def test_a_sum_over_axes_is_the_sums_over_each(data: st.DataObject) -> None:
    """In any order, on axes of one rank too, where every state says the same."""
    mesh = data.draw(strategies.meshes().filter(lambda mesh: mesh.axis_names))
    axes = mesh.axis_names
    order = data.draw(st.permutations(axes))

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        for axis in order:
            x = fp.psum(x, axis)
        return x

    x = torch.arange(2.0 * mesh.size, dtype=torch.float64)
    fp.testing.assert_same(lambda x: fp.psum(x, axes), one_by_one, mesh, (P(axes),), (x,))


def test_what_differs_is_said() -> None:
    with pytest.raises(fp.errors.NotEquivalentError, match="types of the results differ"):
        same(lambda x: fp.psum(x, "i"), lambda x: x, 2)
    with pytest.raises(fp.errors.NotEquivalentError, match="results on rank 0"):
        same(lambda x: fp.psum(x, "i"), lambda x: fp.psum(x, "i") * 2, 2)
    with pytest.raises(fp.errors.NotEquivalentError, match="gradients on rank 0"):
        same(lambda x: x * x, lambda x: x.detach() * x.detach() + 0 * x, 2)


def test_a_gradient_that_is_rounding_alone_is_no_difference() -> None:
    """A bias of all scores changes no softmax; and what is small, but no rounding, is compared as before."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        scores = x @ params["w"] + params["shift"]
        return (scores.softmax(-1) * torch.arange(5.0, dtype=torch.float64)).sum().square()

    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 5, generator=generator).double(), "shift": torch.zeros(1, dtype=torch.float64)}
    x = torch.randn(64, 3, generator=generator).double()
    assert 0 < fp.grad(loss)(params, x)["shift"].abs() < 1e-10, "rounding alone"
    fp.testing.assert_equivalent(loss, fp.data_parallel("data"), Mesh(data=4), params, x)
    small = {"large": torch.ones(2).double(), "small": torch.full((2,), 1e-12).double()}
    with pytest.raises(fp.errors.NotEquivalentError, match="leaf small"):
        compare(small, {**small, "small": small["small"] * 1.01}, "gradient")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64, torch.int64], ids=str)
def test_exactly_is_to_the_bit(dtype: torch.dtype) -> None:
    zero, ones = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=dtype)
    compare([ones, zero], [ones, zero], "results", exact=True)
    with pytest.raises(fp.errors.NotEquivalentError, match="leaf 1"):
        compare([ones, zero + 1e-300], [ones, zero], "results", exact=True)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("got", "want", "said"),
    [
        ([5.0, 7.0], [INF, 1.0], r"at \(0,\): 5.0, not inf"),
        ([INF, 7.0], [INF, 1.0], r"at \(1,\): 7.0, not 1.0; largest difference 6, .* \(largest value 1\)"),
        ([-INF, 1.0], [INF, 1.0], r"at \(0,\): -inf, not inf"),
        ([NAN, 1.0], [NAN, 1.0], r"at \(0,\): NaN on both sides"),
        ([NAN, 2.0], [NAN, 1.0], r"at \(1,\): 2.0, not 1.0"),
        ([1.0, NAN], [1.0, 1.0], r"at \(1,\): nan, not 1.0"),
        ([2**60 + 1], [2**60], r"at \(0,\): 1152921504606846977, not"),
    ],
)
def test_what_is_not_finite_hides_nothing(got: list[float], want: list[float], said: str) -> None:
    """Nor does what float64 rounds."""
    kind = torch.int64 if isinstance(want[0], int) else torch.float64
    with pytest.raises(fp.errors.NotEquivalentError, match=said):
        compare(torch.tensor(got, dtype=kind), torch.tensor(want, dtype=kind), "results")


def test_equal_infinities_are_equal_beside_rounding() -> None:
    want = torch.tensor([INF, -INF, 1.0], dtype=torch.float64)
    compare(want * torch.tensor([1, 1, 1 + 1e-15], dtype=torch.float64), want, "results")


def test_a_number_is_no_tensor() -> None:
    with pytest.raises(fp.errors.NotEquivalentError, match=r"1.0, not tensor\(1.\)"):
        compare(1.0, torch.ones(()), "results")


def test_a_loss_that_is_no_function_is_said_to_be_none() -> None:
    calls = iter(range(10))

    def counting(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (x @ w).sum() + next(calls)

    def writing(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            w.mul_(2)
        return (x @ w).sum()

    for loss in (counting, writing):
        with pytest.raises(fp.errors.NotEquivalentError, match="in a second call with the same arguments"):
            fp.testing.assert_equivalent(loss, fp.data_parallel("data"), Mesh(data=2), torch.ones(3), torch.ones(4, 3))


@pytest.mark.parametrize("x", [torch.arange(8), torch.arange(8.0)])
def test_integers_have_values_alone(x: torch.Tensor) -> None:
    fp.testing.assert_same(lambda x: x.long() + x.long(), lambda x: 2 * x.long(), Mesh(i=2), (P("i"),), (x,))
    with pytest.raises(fp.errors.NotEquivalentError, match="results on rank 0"):
        fp.testing.assert_same(lambda x: x.long() + 1, lambda x: x.long() + 2, Mesh(i=2), (P("i"),), (x,))
