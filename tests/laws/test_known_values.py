"""Values that no argument takes part in are known in a trace: literals, constants, and what is computed of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import functional_parallel as fp
from functional_parallel.errors import TracingError
from sharding_specs import Mesh, P

MESH = Mesh(axis=2)
MASK, WEIGHTS = torch.tensor([True, False, True, True]), torch.tensor([2.0, 3.0]).double()

Function = Callable[[torch.Tensor], torch.Tensor]


def written(x: torch.Tensor) -> torch.Tensor:
    factor = torch.tensor(1.0)
    factor.fill_(5.0)
    return x * factor.item()


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    factors = torch.zeros(4)
    with torch.no_grad():
        factors[1:].add_(torch.arange(3))
    return x * factors[3].item()


def branch(x: torch.Tensor) -> torch.Tensor:
    return x if torch.arange(3).sum() == 3 and torch.equal(torch.arange(2), torch.tensor([0, 1])) else -x


OF_CONSTANTS: dict[str, Function] = {
    "sums of sizes": lambda x: x * int(torch.tensor([1, 2, 3]).cumsum(0)[-1]),
    "list": lambda x: x + sum(torch.linspace(0, 1, 3).tolist()),
    "closed over": lambda x: x * WEIGHTS[1].item(),
    "closed over, list": lambda x: x * sum(WEIGHTS.tolist()),
    "mask": lambda x: x[MASK],
    "mask, selected": lambda x: x.masked_select(MASK),
    "mask beside numbers": lambda x: x.expand(2, 4)[torch.tensor([0, 1, 1]), MASK],
    "mask of the shape": lambda x: x.expand(4, 4)[torch.ones_like(x).expand(4, 4).tril() > 0],
    "numbers": lambda x: x[torch.arange(4).remainder(2).nonzero().squeeze(1)],
    "repeated": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 3])),
    "unique": lambda x: x[torch.tensor([3, 0, 0]).unique()],
    "counts": lambda x: x * torch.bincount(torch.tensor([1, 1, 3])),
    "classes": lambda x: F.one_hot(torch.arange(4)).to(x.dtype) @ x,
    "branch": branch,
    "written": written,
    "written through a view": written_through_a_view,
}


@pytest.mark.parametrize("name", OF_CONSTANTS)
def test_of_constants(name: str) -> None:
    f, x = OF_CONSTANTS[name], torch.arange(1.0, 5.0).double()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (f(x) ** 2).sum()

    def tangent(x: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(f, (x,), (x,))[1]

    assert torch.equal(fp.compile(fp.partition(f, "axis", (P("axis"),)), MESH)(x), f(x))
    for local in (f, tangent):
        assert torch.equal(fp.compile(local, MESH, in_specs=P(), out_specs=P())(x), local(x))
    for plan in (fp.partition(loss, "axis", (P("axis"),), parameters=None), fp.zero(3, "axis")(loss)):
        assert torch.equal(fp.compile(fp.grad(plan), MESH)(x), torch.func.grad(loss)(x))


def test_numpy_of_constants() -> None:
    """Which torch itself does not have under its transforms."""
    f, x = lambda x: (x * float(np.sum(torch.arange(3).numpy()))).sum(), torch.arange(4.0)
    for compiled in (f, lambda x: torch.func.jvp(f, (x,), (x,))[1]):
        assert fp.compile(compiled, MESH, in_specs=P(), out_specs=P())(x) == 18
    assert torch.equal(fp.compile(fp.grad(fp.zero(3, "axis")(f)), MESH)(x), torch.full((4,), 3.0))


def test_what_is_closed_over_and_read_is_read_again_when_it_changes() -> None:
    mask, weights = MASK.clone(), WEIGHTS.clone()
    f = fp.compile(lambda x: x[mask] * weights[0].item() + weights.tolist()[1], MESH, in_specs=P(), out_specs=P())
    x = torch.arange(4.0).double()
    assert torch.equal(f(x), x[mask] * 2 + 3)
    before = f.program
    f(x)
    assert f.program is before
    mask[0], weights[1] = False, 7.0
    assert torch.equal(f(x), x[mask] * 2 + 7)


def test_what_an_enclosing_trace_knows() -> None:
    """A body differentiates what it traces apart."""

    def body(x: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor([1, 3]).cumsum(0)
        return fp.grad(lambda x: (x[: int(sizes[1])] ** 2).sum())(x)

    x = torch.arange(8.0)
    assert torch.equal(fp.compile(body, MESH, in_specs=P("axis"), out_specs=P("axis"))(x), 2 * x)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: torch.tensor(1.0).double().add_(x.sum()).item(),
        lambda x: torch.zeros(2).double().index_fill_(0, torch.tensor([0]), x.sum()).tolist()[1],
        lambda x: x.new_zeros(2).add_(fp.axis_index("axis")).sum().item(),
        lambda x: x[x > 0].sum(),
        lambda x: x.masked_select(x > 0).sum(),
    ],
)
def test_what_an_argument_or_a_rank_takes_part_in_is_not_known(read: Function) -> None:
    with pytest.raises(TracingError, match=r"test_known_values.*needs a tensor's values"):
        fp.compile(lambda x: x * read(x), MESH, in_specs=P("axis"), out_specs=P("axis"))(torch.arange(4.0).double())
