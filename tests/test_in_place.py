"""In-place ops in traced functions: recorded where their effect is known, refused where another view would miss it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import functional_parallel as fp
from functional_parallel.tracing import MutationError
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


def compiled(f: Callable[..., torch.Tensor]) -> fp.Compiled:
    return fp.compile(f, Mesh(data=2), in_specs=P(), out_specs=P())


@pytest.mark.parametrize("f", [filled_by_parts, filled_diagonal])
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


@pytest.mark.parametrize("f", [view_changed_twice, base_changed_under_a_view, view_of_a_view])
def test_an_effect_that_another_view_would_miss_is_refused(f: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(MutationError, match="another view of shape"):
        compiled(f)(torch.tensor([5.0, 6.0]))


@pytest.mark.parametrize("transform", [torch.func.hessian, torch.func.jacrev, torch.func.jacfwd])
def test_jacobians_that_torch_builds_from_a_diagonal(transform: Callable[..., Callable[..., torch.Tensor]]) -> None:
    """torch fills the diagonal of a zero matrix in place to get its basis vectors."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x**3).sum() if transform is torch.func.hessian else x**3

    x = torch.tensor([5.0, 6.0, 1.0])
    assert torch.equal(compiled(transform(f))(x), transform(f)(x))
