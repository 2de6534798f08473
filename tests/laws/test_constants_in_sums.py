"""Constants that are added to partial sums count once, and do not cost a sum over ranks each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import TypingError
from sharding_specs import Mesh, P

WEIGHTS = {str(i): torch.arange(16.0, dtype=torch.float64).reshape(4, 4) % (i + 2) - 1 for i in range(6)}
X = torch.arange(48.0, dtype=torch.float64).reshape(12, 4) % 5 - 2
TENSOR = fp.tensor_parallel("tensor", {"*": P("tensor")})
PLANS = {
    "data": (fp.data_parallel("data"), Mesh(data=2)),
    "three ranks": (fp.data_parallel("data"), Mesh(data=3)),
    "zero 3": (fp.zero(3, "data"), Mesh(data=2)),
    "tensor": (TENSOR, Mesh(tensor=2)),
    "tensor and zero": (fp.chain(TENSOR, fp.zero(1, "data")), Mesh(data=2, tensor=2)),
    "accumulate": (fp.accumulate(3), Mesh()),
    "data and accumulate": (fp.chain(fp.data_parallel("data"), fp.accumulate(2)), Mesh(data=2)),
    "uneven microbatches": (fp.accumulate(5), Mesh()),
    "master": (fp.data_parallel("data", master=0), Mesh(data=2)),
}
SUMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": sum,  # type: ignore[dict-item]
    "a constant": lambda terms: sum(terms, torch.tensor(0.0, dtype=torch.float64)),
    "zeros": lambda terms: sum(terms, terms[0].new_zeros(())),
    "numbers": lambda terms: sum((3 - (term + 1) - 2 for term in terms), 1.5) / 1 - 0,
    "ones": lambda terms: 1 * sum(terms, torch.ones((), dtype=torch.float64)) * 1.0,
    "scaled": lambda terms: torch.sub(torch.add(sum(terms), 2, alpha=3), 1, alpha=2),
    "stacked": lambda terms: torch.stack([*terms, torch.tensor(2.0, dtype=torch.float64)]).sum(),
    "chosen": lambda terms: torch.where(torch.arange(6) > 2, torch.stack(terms), torch.full((6,), 3.0).double()).sum(),
}


def loss_of(total: Callable[[list[Tensor]], Tensor]) -> Callable[..., Tensor]:
    return lambda p, x: total([(x @ w).square().sum() for w in p.values()])


@pytest.mark.parametrize("name", SUMS)
def test_terms_are_summed_over_ranks_once(name: str) -> None:
    step = fp.compile(fp.data_parallel("data")(loss_of(SUMS[name])), Mesh(data=3))
    assert torch.equal(step(WEIGHTS, X), loss_of(SUMS[name])(WEIGHTS, X))
    assert step.program.counts() == {("psum", ("data",)): 1}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.every(4)
def test_a_constant_counts_once(name: str, plan: str) -> None:
    transform, mesh = PLANS[plan]
    fp.testing.assert_equivalent(loss_of(SUMS[name]), transform, mesh, WEIGHTS, X, exact=True, draw=False)


UNARY: Sequence[Callable[[Tensor, float], Tensor]] = [
    lambda u, c: u + c,
    lambda u, c: c - u,
    lambda u, c: u - c,
    lambda u, c: u * c,
    lambda u, c: u + torch.full_like(u, c),
    lambda u, c: torch.full((), c).double() - u,
    lambda u, c: u + torch.arange(u.numel()).reshape(u.shape),
    lambda u, c: torch.cat([u, torch.full((1, 4), c).double()])[1:],
    lambda u, c: torch.where(torch.arange(4) > c, u, torch.full((4,), c).double()),
    lambda u, c: u.relu() + u,
    lambda u, c: (u + c) * u,
]


@settings(max_examples=12)
@given(
    steps=st.lists(st.tuples(st.sampled_from(UNARY), st.integers(-2, 2)), min_size=1, max_size=4),
    plan=st.sampled_from(["data", "three ranks", "tensor", "accumulate"]),
)
def test_any_sum_with_constants_equals_one_rank(steps: Any, plan: str) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        found = x.T @ x @ p["1"]
        for apply, number in steps:
            found = apply(found, number)
        return found.sum()

    transform, mesh = PLANS[plan]
    fp.testing.assert_equivalent(loss, transform, mesh, WEIGHTS, X, exact=True, draw=False)


def test_partial_sums_that_are_complete_already_are_not_summed_again() -> None:
    """As in a norm, whose variance is read twice."""

    def loss(p: Any, x: Tensor) -> Tensor:
        var = (x @ p["1"]).square().sum()
        return (var + 2).sqrt() + var.log()

    step = fp.compile(fp.data_parallel("data")(loss), Mesh(data=2))
    step(WEIGHTS, X)
    assert step.program.counts() == {("psum", ("data",)): 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.complex128])
def test_neutral_numbers_keep_every_bit(dtype: torch.dtype) -> None:
    x = torch.tensor([-0.0, 0.0, float("inf"), float("nan"), -2.5]).nan_to_num(3.0, 7.0).to(dtype)
    x = x if dtype is torch.int64 else torch.cat([x, torch.tensor([-0.0, float("inf")]).to(dtype)])

    def f(x: Tensor) -> list[Tensor]:
        return [
            x + 0,
            0 + x,
            x - 0,
            x + -0.0,
            x * 1,
            1 * x,
            x / 1,
            x * 1.0,
            x + 0.0,
            x - -0.0,
            torch.add(x, 0, alpha=2),
        ]

    step = fp.compile(fp.partition(f, "data", (P("data"),), parameters=None), Mesh(data=1))
    for mine, right in zip(step(x), f(x), strict=True):
        assert mine.dtype == right.dtype
        mine, right = (torch.view_as_real(each) if dtype.is_complex else each for each in (mine, right))
        assert torch.equal(mine.double().view(torch.int64), right.double().view(torch.int64))


def test_neutral_numbers_are_no_ops() -> None:
    step = fp.compile(fp.data_parallel("data")(lambda w, x: (((x @ w) * 1 - 0) / 1 + 0).sum()), Mesh(data=2))
    step(WEIGHTS["1"], X)
    assert not {"mul.Tensor", "div.Tensor", "sub.Tensor"} & {
        str(node.target).removeprefix("aten.") for node in step.program.traced.nodes
    }


def test_a_result_is_no_alias_of_an_argument() -> None:
    step = fp.compile(lambda x: x * 1, Mesh(data=1), in_specs=(P(),), out_specs=P())
    x = torch.ones(3)
    step(x).add_(1)
    assert x.tolist() == [1, 1, 1]


def test_in_place_sums_of_a_product_with_one_leave_the_factor() -> None:
    def loss(w: Tensor, x: Tensor) -> Tensor:
        h = x @ w
        k = h * 1
        k += 1
        return (h * k).sum()

    fp.testing.assert_equivalent(loss, fp.data_parallel("data"), Mesh(data=2), WEIGHTS["1"], X, exact=True)


@pytest.mark.parametrize("number, is_taken", [(0, True), (1, False)])
def test_a_body_may_add_zero_to_partial_sums_only(number: int, is_taken: bool) -> None:
    body = fp.shard_map(
        lambda x: fp.psum(sum([fp.pcast(x, "i", to="unreduced")] * 2, number), "i"), Mesh(i=2), P("i"), P()
    )
    if is_taken:
        assert body(torch.ones(2)).tolist() == [4]
    else:
        with pytest.raises(TypingError, match="not linear"):
            body(torch.ones(2))
