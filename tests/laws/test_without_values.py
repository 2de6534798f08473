"""torch's functions that look at values on their way, in traces, which have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..some_cases import one_in

MESH = Mesh(axis=2)


def integers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def check(f: Callable[..., torch.Tensor], specs: tuple[P, ...], *values: torch.Tensor, exact: bool = True) -> None:
    """Value and gradients, of parts and of the whole."""

    def loss(*values: torch.Tensor) -> torch.Tensor:
        result = f(*values)
        return (result * torch.arange(result.numel()).reshape(result.shape)).sum()

    moving = tuple(index for index, value in enumerate(values) if value.is_floating_point())
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-12, "atol": 1e-12}
    for whole, local in (
        (f, fp.partition(f, "axis", specs, parameters=None)),
        (fp.grad(loss, moving), fp.grad(fp.partition(loss, "axis", specs, parameters=None), moving)),
    ):
        torch.testing.assert_close(fp.compile(local, MESH)(*values), whole(*values), **tolerance)


# -----------------------------------------------------------------------------
# Masks
# -----------------------------------------------------------------------------


@given(
    shape=st.sampled_from([(4, 6, 2), (8, 2), (4,), (2, 2, 2, 2)]),
    masked=st.integers(0, 3),
    ahead=st.integers(0, 2),
    like=st.sampled_from(["scalar", "row", "one"]),
    split=st.integers(0, 3),
    seed=st.integers(0, 9),
)
@settings(max_examples=12)
def test_a_masked_write_of_one_value_is_a_choice(
    shape: tuple[int, ...], masked: int, ahead: int, like: str, split: int, seed: int
) -> None:
    ahead = min(ahead, len(shape) - 1)
    masked = max(1, min(masked, len(shape) - ahead))
    mask = integers(*shape[ahead : ahead + masked], seed=seed) > 0
    trailing = shape[ahead + masked :]
    size = {"scalar": (), "row": trailing, "one": (*shape[:ahead], 1, *trailing)}[like]
    spec = P(*[None] * (split % len(shape)), "axis")

    def write(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y[(*[slice(None)] * ahead, mask)] = value
        return y

    check(write, (spec, P()), integers(*shape, seed=seed + 1), integers(*size, seed=seed + 2))


@pytest.mark.parametrize("like", ["number", "scalar", "row"])
def test_a_masked_write_gathers_nothing(like: str) -> None:
    def write(x: torch.Tensor, mask: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[mask] = {"number": 3.0, "scalar": value[0], "row": value}[like]
        return y

    values = integers(4, 6), integers(4) > 0, integers(6, seed=1)
    check(write, (P("axis"), P("axis"), P()), *values)
    step = fp.compile(fp.partition(write, "axis", (P("axis"), P("axis"), P())), MESH)
    step(*values)
    assert step.program.counts() == {}


def test_what_a_mask_chooses_is_added_to() -> None:
    mask = integers(4, 6) > 0
    for value in (integers(1)[0], integers(1)):
        check(lambda x, v: x.index_put((mask,), v, accumulate=True), (P("axis"), P()), integers(4, 6, seed=1), value)


def test_as_many_values_as_the_mask_is_true_are_written_in_order() -> None:
    mask = torch.tensor([True, False, True, True])
    local = fp.partition(lambda x, v: x.index_put((mask,), v), "axis", (P("axis"), P()))
    values = integers(4), integers(3, seed=1)
    assert torch.equal(fp.compile(local, MESH)(*values), values[0].index_put((mask,), values[1]))


@one_in(3, index=[[0, 2], [1, 1, 3], 3], dim=[0, 1, -1])
def test_index_fill_with_a_tensor(index: list[int] | int, dim: int) -> None:
    where = torch.tensor(index, dtype=torch.int64)
    for spec in (P("axis"), P(None, "axis")):
        check(lambda x, v: x.index_fill(dim, where, v), (spec, P()), integers(4, 4), torch.tensor(5.0).double())
    scalar = torch.tensor([0])
    check(lambda x, v: (3 * x).sum().index_fill(0, scalar, v), (P("axis"), P()), integers(4), integers(1)[0])


@pytest.mark.parametrize("index", [[-1, 1], []], ids=str)
def test_index_fill_from_the_end_and_of_nothing(index: list[int]) -> None:
    where = torch.tensor(index, dtype=torch.int64)
    local = fp.partition(lambda x, v: x.index_fill(0, where, v), "axis", (P("axis"), P()))
    values = integers(4, 4), torch.tensor(5.0).double()
    assert torch.equal(fp.compile(local, MESH)(*values), values[0].index_fill(0, where, values[1]))


# -----------------------------------------------------------------------------
# Losses and statistics
# -----------------------------------------------------------------------------


@one_in(3, var=[(4, 6), (4, 1), (4,)], full=[False, True], reduction=["none", "mean", "sum"])
def test_gaussian_likelihoods(var: tuple[int, ...], full: bool, reduction: str) -> None:
    def loss(x: torch.Tensor, y: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return F.gaussian_nll_loss(x, y, variance, full=full, eps=2.0, reduction=reduction)

    values = integers(4, 6), integers(4, 6, seed=1), integers(*var, seed=2).abs()  # some are below eps
    check(loss, (P("axis"), P(), P("axis")), *values, exact=False)


def test_a_gaussian_likelihood_of_wrong_shapes_is_refused() -> None:
    local = fp.partition(lambda x: F.gaussian_nll_loss(x, x, torch.ones(3)), "axis", (P("axis"),))
    with pytest.raises(ValueError, match=r"var of shape \(3,\) is not one of input's \(4, 6\)"):
        fp.compile(local, MESH)(integers(4, 6))


@pytest.mark.parametrize("spec", [P("axis"), P(None, "axis")], ids=str)
@pytest.mark.parametrize("f", [torch.cov, torch.corrcoef, lambda x: torch.cov(x, correction=0)])
def test_covariances(f: Callable[[torch.Tensor], torch.Tensor], spec: P) -> None:
    check(f, (spec,), integers(4, 6), exact=False)
    check(lambda x: f(x[1]), (spec,), integers(4, 6), exact=False)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 brought it")
def test_a_linear_cross_entropy_in_chunks_is_that_without() -> None:
    options, target = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=2), torch.tensor([1, 5, 0, 3])

    def loss(h: torch.Tensor, w: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.linear_cross_entropy(h, w, target, **options)

    values, specs = (integers(4, 3) / 4, integers(6, 3, seed=1) / 4), (P("axis"), P())
    local = fp.partition(lambda h, w: loss(h, w, options=options), "axis", specs, parameters=None)
    torch.testing.assert_close(fp.compile(fp.grad(local), MESH)(*values), torch.func.grad(loss)(*values))


def test_class_weights_of_a_single_sample() -> None:
    weight, target = torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.tensor(2)
    check(lambda z, t: F.cross_entropy(z, t, weight), (P("axis"), P()), integers(4), target, exact=False)


# -----------------------------------------------------------------------------
# Corners that torch's samples showed
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("f", [torch.sgn, lambda x: torch.copysign(x.detach(), x), lambda x: x.repeat(0) + 1])
def test_a_derivative_of_zeros_lies_as_any_other(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = integers(4) + 0.5
    for plan in (fp.zero(3, "axis"), fp.tensor_parallel("axis", P("axis")), fp.zero(1, "axis")):
        assert torch.equal(fp.compile(fp.grad(plan(lambda x: f(3 * x).sum())), MESH)(x), torch.zeros(4).double())


def test_logsumexp_of_nothing_but_minus_infinity() -> None:
    x = torch.tensor([[-torch.inf] * 4, [1.0, 2, 3, -torch.inf], [torch.inf, 1, 2, 3]])
    local = fp.partition(lambda x: x.logsumexp(1), "axis", (P(None, "axis"),))
    torch.testing.assert_close(fp.compile(local, MESH)(x), x.logsumexp(1))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: x.logsumexp(0),
        lambda x: x.amax(0) + x.mean(0) + x.squeeze(0) + x.transpose(0, 0),
        lambda x: x.max(0).values + x.topk(1, 0).values + x.sort(0).values + x.cumsum(0),
        lambda x: x.prod(0) + x.std(0, correction=0) + torch.linalg.vector_norm(x, dim=(0,)),
        lambda x: x.gather(0, torch.tensor([0])) + x.index_select(0, torch.tensor(0)),
    ],
)
def test_a_scalar_has_a_dim_to_reduce(f: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check(lambda x: f(x.sum()), (P("axis"),), integers(4) + 9)


@one_in(
    3,
    shapes=[
        ((2, 4, 6, 8), (4, 6, 8), (4, 6, 8)),
        ((6, 8), (2, 6, 8), (4, 2, 6, 8)),
        ((4, 1, 6, 8), (1, 2, 6, 8), (4, 1, 6, 8)),
    ],
    split=[0, 1, 2],
)
def test_attention_of_batches_that_broadcast(shapes: Any, split: int) -> None:
    values = tuple(integers(*shape, seed=seed) / 8 for seed, shape in enumerate(shapes))
    specs = [P() for _ in values]
    specs[split] = P(*[None] * (values[split].ndim - 2), "axis")
    check(F.scaled_dot_product_attention, tuple(specs), *values, exact=False)


def test_results_of_an_elementwise_op_with_two() -> None:
    mantissas, exponents = fp.compile(fp.partition(torch.frexp, "axis", (P("axis"),)), MESH)(integers(4))
    assert torch.equal(torch.ldexp(mantissas, exponents), integers(4))


def test_factors_of_products_of_integers_are_integers() -> None:
    values = torch.tensor([5, 7]), torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, 3])

    def f(bias: torch.Tensor, matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.addmv(bias, matrix, x, beta=0.9, alpha=2.5)

    local = fp.partition(f, "axis", (P(), P(None, "axis"), P("axis")))
    assert torch.equal(fp.compile(local, MESH)(*values), f(*values))
