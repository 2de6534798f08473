"""Collectives from and to a value that one rank owns: what they mean, their transposes, and their bits on processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.collectives import apply_primitive
from functional_parallel.errors import OutSpecError
from sharding_specs import Mesh, P

from ..processes import run_on_processes

KINDS: dict[str, tuple[Any, Any]] = {  # parameters before and after the owner
    "broadcast": ((), ("varying",)),
    "scatter": ((0,), ()),
    "gather": ((0,), ()),
    "reduce": ((), ("varying",)),
}


def apply(kind: str, x: Tensor, owner: int) -> Tensor:
    before, after = KINDS[kind]
    return apply_primitive(kind, x, ("i",), *before, owner, *after)


def program(kind: str, ranks: int, owner: int) -> Any:
    """A body with the collective, and its derivative."""
    on_owner, split = P(owner={"i": owner}), P("i")
    takes, gives = (on_owner, split) if kind in ("broadcast", "scatter") else (split, on_owner)

    def body(x: Tensor, y: Tensor) -> Any:
        result, pull = torch.func.vjp(lambda x: apply(kind, x, owner), x)
        return result, pull(y)[0]

    return fp.shard_map(body, Mesh(i=ranks), in_specs=(takes, gives), out_specs=(gives, takes))


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).double()


def arguments(kind: str, ranks: int, seed: int) -> tuple[Tensor, Tensor]:
    """An operand and a cotangent, as full tensors: the shards of all ranks, or the owner's value."""
    whole, part = numbers(2 * ranks, 3, seed=seed), numbers(2 * ranks * ranks, 3, seed=seed + 1)
    return {"broadcast": (whole, part), "scatter": (whole, whole + 1), "gather": (whole, whole + 1)}.get(
        kind, (part, whole)
    )


def expected(kind: str, x: Tensor, ranks: int) -> Tensor:
    """The result as a full tensor."""
    if kind == "broadcast":
        return x.repeat(ranks, 1)
    return torch.stack(x.chunk(ranks)).sum(0) if kind == "reduce" else x


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 4), st.integers(0, 100), st.data())
def test_they_mean_what_they_say_and_transpose_to_their_partner(
    kind: str, ranks: int, seed: int, data: st.DataObject
) -> None:
    owner = data.draw(st.integers(0, ranks - 1))
    x, y = arguments(kind, ranks, seed)
    result, pulled = program(kind, ranks, owner)(x, y)
    partner = {"broadcast": "reduce", "reduce": "broadcast", "scatter": "gather", "gather": "scatter"}[kind]
    assert torch.equal(result, expected(kind, x, ranks)) and torch.equal(pulled, expected(partner, y, ranks))
    assert (result * y).sum() == (x * pulled).sum()  # the definition of a transpose


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivatives_and_vmap(kind: str) -> None:
    from_owner = kind in ("broadcast", "scatter")
    x = numbers(4, 3, seed=0) if from_owner else numbers(2, 4, 3, seed=0)

    def squares(x: Tensor) -> Tensor:
        """The sum of the squares of the results of all ranks, on every rank."""
        in_dim, out_dim = (None, 0) if from_owner else (0, None)
        mapped = fp.collectives.vmap(lambda x: apply(kind, x, 1), in_dim, out_dim, axis_name="i", axis_size=2)
        return mapped(x).square().sum()

    assert torch.func.hessian(squares)(x).reshape(x.numel(), -1).trace() > 0
    gradient = torch.func.grad(squares)
    twice = torch.func.jvp(gradient, (x,), (x,))[1]
    assert torch.equal(twice, gradient(x))  # it is linear


def on_processes(rank: int, ranks: int, owner: int) -> list[Tensor]:
    return [result for kind in KINDS for result in program(kind, ranks, owner)(*arguments(kind, ranks, 7))]


@pytest.mark.parametrize("ranks, owner", [(2, 1), (3, 0)])
def test_processes_have_the_results_of_simulated_ranks(ranks: int, owner: int) -> None:
    wanted = on_processes(0, ranks, owner)
    for found in run_on_processes(on_processes, ranks, ranks, owner):
        assert all(map(torch.equal, found, wanted))


def test_a_value_of_one_rank_is_not_returned_as_a_value_of_all() -> None:
    with pytest.raises(OutSpecError, match=r"held by one rank along 'i'.*owner"):
        fp.shard_map(lambda x: x * 2, Mesh(i=2), in_specs=P(owner={"i": 0}), out_specs=P())(torch.ones(2))


@pytest.mark.parametrize("owner", [0, 1])
def test_partial_sums_are_reduced_to_an_owner_and_their_gradient_is_broadcast_as_reduced(owner: int) -> None:
    on_owner, partial = P(owner={"i": owner}), P(unreduced={"i"})

    def body(x: Tensor, y: Tensor) -> Any:
        result, pull = torch.func.vjp(lambda x: apply_primitive("reduce", x, ("i",), owner, "unreduced"), x)
        return result, pull(y)[0]

    x, y = numbers(4, seed=0), numbers(4, seed=1)
    mapped = fp.shard_map(body, Mesh(i=2), in_specs=(partial, on_owner), out_specs=(on_owner, partial.dual()))
    result, pulled = mapped(x, y)
    assert torch.equal(result, x) and torch.equal(pulled, y)
