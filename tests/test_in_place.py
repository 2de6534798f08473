"""In-place ops in traced functions: all views of a memory see what one of them writes; refused where that is not known.

`laws/test_in_place.py` has random ones, with derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.errors import MutationError
from sharding_specs import Mesh, P


def filled_by_parts(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(4, dtype=x.dtype)
    y[1:3] = x
    y[0] = x[1]
    y[3:].sub_(2)
    return y


def filled_diagonal(x: torch.Tensor) -> torch.Tensor:
    y = x.expand(2, 2) * 1
    y.diagonal().mul_(3)
    return y


def view_changed_twice(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    part = y[1]
    part += 1
    part *= 3
    return y


def base_changed_under_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    part = y[1]
    y += 1
    return part


def view_of_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x.expand(2, 2) * 1
    row = y[0]
    row[1] = 7
    return row


def chunks_of_a_product(x: torch.Tensor) -> torch.Tensor:
    """As torch's own LSTM does."""
    first, second = (x * torch.ones(3, 2, dtype=x.dtype)).unsafe_chunk(2, 1)
    return first.sigmoid_() + second.tanh_()


def parts_of_complex_numbers(x: torch.Tensor) -> torch.Tensor:
    """As torch's derivative of a complex QR decomposition does."""
    pairs = torch.stack([x, 2 * x], -1)
    y = torch.view_as_complex(pairs)
    y.real.mul_(3)
    y.conj().imag.add_(x)
    y[1:].conj().mul_(1 + 2j)
    return torch.view_as_real(y) + pairs


def copied_from_another_type(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(3, 2, dtype=x.dtype)
    y.copy_(x.int())
    return y


def constant_of_its_own(x: torch.Tensor) -> torch.Tensor:
    y = torch.tensor([1.0, 2.0])
    y[0] = 7
    return x * y


def compiled(f: Callable[..., torch.Tensor]) -> fp.Compiled:
    return fp.compile(f, Mesh(data=2), in_specs=P(), out_specs=P())


SEEN = [filled_by_parts, filled_diagonal, view_changed_twice, base_changed_under_a_view, view_of_a_view]
SEEN += [chunks_of_a_product, parts_of_complex_numbers, copied_from_another_type, constant_of_its_own]


@pytest.mark.parametrize("f", SEEN)
def test_writing_to_a_view_changes_what_it_is_a_view_of(f: Callable[..., torch.Tensor]) -> None:
    x = torch.tensor([5.0, 6.0])
    assert torch.equal(compiled(f)(x), f(x))


def test_gradient_through_a_view_that_was_written_to() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (filled_diagonal(x) ** 2).sum()

    x = torch.tensor([5.0, 6.0])
    assert torch.equal(compiled(fp.grad(f))(x), torch.func.grad(f)(x))


@pytest.mark.parametrize(
    "f", [lambda x: (x @ torch.ones(2, 3, dtype=x.dtype)).relu(), lambda x: (x * 2).unsqueeze_(0) + x]
)
def test_reshaping_in_place_reshapes(f: Callable[..., torch.Tensor]) -> None:
    """torch's product of a vector and a matrix squeezes its result in place."""
    x = torch.tensor([5.0, 6.0])
    assert torch.equal(compiled(f)(x), f(x))


def changed_apart(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.detach().mul_(2)
    return y


def changed_by_strides(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.as_strided((2, 1), (0, 1)).mul_(2)
    return y


@pytest.mark.parametrize("f", [changed_apart, changed_by_strides])
def test_an_effect_that_is_not_known_is_refused(f: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(MutationError, match="Another view of it, of shape"):
        compiled(f)(torch.tensor([5.0, 6.0]))


OUTSIDE = torch.zeros(2)


@pytest.mark.parametrize("view", [lambda y: y, lambda y: y[1:], lambda y: (y + 1, y.view(1, 2))[1]])
def test_a_change_of_what_the_function_closes_over_is_refused(view: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(MutationError, match="closes over"):
        compiled(lambda x: x + view(OUTSIDE).add_(1).sum())(torch.tensor([5.0, 6.0]))
    assert not OUTSIDE.any()


def test_another_shape_without_gradients_is_refused() -> None:
    """torch gives the gradient of the old shape, or an error."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        with torch.no_grad():
            y.unsqueeze_(0)
        return y

    with pytest.raises(MutationError, match=r"under torch.no_grad\(\) changes the shape"):
        compiled(turned)(torch.tensor([5.0, 6.0]))


def test_without_gradients_a_product_with_a_vector() -> None:
    """Which torch squeezes in place, and which has no gradient to lose."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            factor = torch.ones(3, 2) @ x
        return x.sum() * factor.relu_()

    x = torch.tensor([5.0, 6.0])
    assert torch.equal(compiled(f)(x), f(x))


@pytest.mark.parametrize("transform", [torch.func.hessian, torch.func.jacrev, torch.func.jacfwd])
def test_jacobians_that_torch_builds_from_a_diagonal(transform: Callable[..., Callable[..., torch.Tensor]]) -> None:
    """torch fills the diagonal of a zero matrix in place to get its basis vectors."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum() if transform is torch.func.hessian else x**3

    x = torch.tensor([5.0, 6.0, 1.0])
    assert torch.equal(compiled(transform(f))(x), transform(f)(x))


@pytest.mark.parametrize("norm", [lambda y: y.norm(p=3), lambda y: torch.nn.functional.normalize(y, p=3).sum()])
def test_gradient_of_a_norm(norm: Callable[..., torch.Tensor]) -> None:
    """Whose backward takes a power in place, by an op with an overload of another name."""
    x, w = torch.randn(4, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    fp.testing.assert_equivalent(lambda w, x: norm(x @ w), fp.data_parallel("data"), Mesh(data=2), w, x, rtol=1e-12)


def test_a_result_written_where_the_caller_says() -> None:
    """As the op without `out=`, and a copy, which all views of that memory see; torch wants gradients off for it."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 3
        with torch.no_grad():
            z = torch.zeros(3, 2, dtype=x.dtype)
            torch.add(y, x, alpha=2, out=z[1])
            torch.sum(y[None], 0, out=z[2])
        return (y * z).sum()

    x = torch.tensor([5.0, 6.0])
    assert torch.equal(compiled(f)(x), f(x))
    assert torch.equal(compiled(torch.func.grad(f))(x), torch.func.grad(f)(x))


def test_a_result_that_does_not_fit_where_the_caller_says() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.add(x, x, out=torch.empty(0)).sum()

    with pytest.raises(MutationError, match=r"aten\.add\.out .* \(0,\) .* to \(2,\); use the result of the op"):
        compiled(f)(torch.ones(2))


def test_results_written_where_the_caller_says() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.max(x, 0, out=(torch.empty(()), torch.empty((), dtype=torch.int64)))[0]

    with pytest.raises(MutationError, match=r"aten\.max\.dim_max .* use its result, without out="):
        compiled(f)(torch.ones(2))


@pytest.mark.parametrize("plan", [fp.zero(2, "data"), fp.chain(fp.zero(3, "data"), fp.offload(state="host"))])
def test_a_step_that_a_loss_scale_skips_is_in_place(plan: Any) -> None:
    """The update itself skips, so that no step holds the state twice."""
    scale = fp.LossScale(initial=2.0**40, window=2, hysteresis=1)
    precision = fp.mixed_precision("fp16", loss_scale=scale)
    w, x, found = torch.linspace(-1, 1, 64 * 8).reshape(64, 8), torch.ones(4, 64), []
    for donate in (True, False):
        train = fp.train_step(
            lambda w, x: (x @ w).square().mean(),
            fp.optim.adamw(0.1),
            Mesh(data=2),
            fp.chain(precision, plan),
            donate=donate,
        )
        state, skipped = train.init(w), 0
        for _ in range(40):
            state, metrics = train(state, x)
            skipped += int(metrics.skipped)
        found.append([*optree.tree_leaves(train.whole(state)), metrics.loss])
        assert 5 < skipped < 40 and str(train.program).count("adamw_(") == donate
    assert all(map(torch.equal, *found))
