"""Every collective as a row of one table, which the laws in this folder go through.

A row says what the collective does to a whole group (in the terms of `group`, or by hand) and which states it takes and
gives; from the states follows how its transpose pairs with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from functional_parallel import collectives as fp
from functional_parallel.collectives import State, reference

V, I, U, R, O = State  # noqa: E741 - the names of the types

SIZES = {"a": 2, "b": 3}
SHAPE = (6, 12)
AXES = [("a",), ("b",), ("a", "b"), ("b", "a")]


@dataclass(frozen=True)
class Case:
    """A collective, what it means, and its type."""

    name: str
    apply: Callable[[Tensor, tuple[str, ...]], Tensor]
    reference: Callable[[list[Tensor]], list[Tensor]]
    takes: State
    gives: State

    def __str__(self) -> str:
        return f"{self.name} {self.takes.letter}→{self.gives.letter}"


def _only_on(root: int, values: list[Tensor]) -> list[Tensor]:
    return [value if rank == root else torch.zeros_like(value) for rank, value in enumerate(values)]


def _emit(name: str, *params: object) -> Callable[[Tensor, tuple[str, ...]], Tensor]:
    return lambda x, axes: fp.apply_primitive(name, x, axes, *params)


CASES = [
    Case("psum", lambda x, axes: fp.psum(x, axes), reference.psum, V, I),
    Case("psum", _emit("psum", "unreduced"), reference.psum, U, I),
    Case("pmean", lambda x, axes: fp.pmean(x, axes), lambda v: [s / len(v) for s in reference.psum(v)], V, I),
    Case("psum_scatter 0", lambda x, axes: fp.psum_scatter(x, axes), lambda v: reference.psum_scatter(v, 0), V, V),
    Case("psum_scatter 1", lambda x, axes: fp.psum_scatter(x, axes, -1), lambda v: reference.psum_scatter(v, 1), V, V),
    Case("psum_scatter", _emit("psum_scatter", 0, "unreduced"), lambda v: reference.psum_scatter(v, 0), U, V),
    Case("all_gather 0", lambda x, axes: fp.all_gather(x, axes), lambda v: reference.all_gather(v, 0), V, V),
    Case("all_gather 1", lambda x, axes: fp.all_gather(x, axes, -1), lambda v: reference.all_gather(v, 1), V, V),
    Case(
        "all_gather", lambda x, axes: fp.all_gather(x, axes, to="invariant"), lambda v: reference.all_gather(v, 0), V, I
    ),
    Case(
        "all_gather",
        lambda x, axes: fp.all_gather(x, axes, 1, to="reduced"),
        lambda v: reference.all_gather(v, 1),
        V,
        R,
    ),
    Case("pscatter 0", lambda x, axes: fp.pscatter(x, axes), lambda v: reference.pscatter(v, 0), I, V),
    Case("pscatter 1", lambda x, axes: fp.pscatter(x, axes, 1), lambda v: reference.pscatter(v, 1), I, V),
    *(
        Case(
            f"all_to_all {split}{concat}",
            lambda x, axes, s=split, c=concat: fp.all_to_all(x, axes, s, c),
            lambda v, s=split, c=concat: reference.all_to_all(v, s, c),
            V,
            V,
        )
        for split, concat in product((0, 1), repeat=2)
    ),
    Case(
        "all_to_all of three dims",
        lambda x, axes: fp.all_to_all(x.unsqueeze(2), axes, 0, 1).squeeze(2),
        lambda v: reference.all_to_all(v, 0, 1),
        V,
        V,
    ),
    Case(
        "ppermute partial",
        lambda x, axes: fp.ppermute(x, axes, [(1, 0)]),
        lambda v: reference.ppermute(v, [1, 0]),
        V,
        V,
    ),
    Case(
        "ppermute swap",
        lambda x, axes: fp.ppermute(x, axes, [(0, 1), (1, 0)]),
        lambda v: reference.ppermute(v, [0, 1, 1, 0]),
        V,
        V,
    ),
    Case("pbroadcast", lambda x, axes: fp.pbroadcast(x, axes, 1), lambda v: reference.pbroadcast(v, 1), V, I),
    Case("pvary", lambda x, axes: fp.pvary(x, axes), reference.pcast, I, V),
    Case("pcast", lambda x, axes: fp.pcast(x, axes, to="reduced"), reference.pcast, I, R),
    Case("pcast", lambda x, axes: fp.pcast(x, axes, to="varying", src="reduced"), reference.pcast, R, V),
    Case("pcast", lambda x, axes: fp.pcast(x, axes, to="unreduced"), reference.pcast, V, U),
    Case(
        "scatter",
        lambda x, axes: fp.scatter(x, axes, source=1),
        lambda v: list(v[1].chunk(len(v), 0)),
        V,
        V,
    ),
    Case(
        "gather",
        lambda x, axes: fp.gather(x, axes, root=1, dim=1),
        lambda v: _only_on(1, reference.all_gather(v, 1)),
        V,
        V,
    ),
    Case("reduce", lambda x, axes: fp.reduce(x, axes, root=1), lambda v: _only_on(1, reference.psum(v)), V, V),
    Case(
        "send",
        lambda x, axes: fp.recv(fp.send(x, axes, source=0, target=1)),
        lambda v: reference.ppermute(v, [0, 1]),
        V,
        V,
    ),
]


def same_everywhere(state: State) -> bool:
    """Whether all ranks hold the same value, so that it is not mapped."""
    return state in (I, R)


def over_mesh(fn: Callable[..., Tensor], mapped: list[tuple[str, ...]]) -> Callable[..., Tensor]:
    """Run a per-rank function on whole tensors of shape (|a|, |b|, ...), by one named vmap per axis.

    `mapped` says for each argument along which axes it differs; it has no leading dim for the others. The result has
    both leading dims.
    """
    for axis in reversed(SIZES):
        dims = tuple(0 if axis in names else None for names in mapped)
        fn = fp.vmap(fn, in_dims=dims, axis_name=axis, axis_size=SIZES[axis])
    return fn


def mapped_axes(state: State, axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes along which a value differs that has this state on `axes`, and varies along all others."""
    return tuple(axis for axis in SIZES if axis not in axes or not same_everywhere(state))


def stored(x: Tensor, state: State, axes: tuple[str, ...]) -> Tensor:
    """Drop the leading dims along which all ranks hold the same."""
    if same_everywhere(state):
        for position, axis in reversed(list(enumerate(SIZES))):
            x = x.select(position, 0) if axis in axes else x
    return x


def spread(x: Tensor, state: State, axes: tuple[str, ...]) -> Tensor:
    """Make a value of full leading dims one that a state allows: the same on all ranks where it must be."""
    if same_everywhere(state):
        for position, axis in enumerate(SIZES):
            x = x.narrow(position, 0, 1).expand_as(x) if axis in axes else x
    return x


def by_group(reference: Callable[[list[Tensor]], list[Tensor]], x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """Apply a group's meaning to every group of ranks along `axes` of a tensor of shape (|a|, |b|, ...)."""
    results: dict[tuple[int, ...], Tensor] = {}
    rest = [axis for axis in SIZES if axis not in axes]
    for fixed in product(*(range(SIZES[axis]) for axis in rest)):
        members = []
        for moving in product(*(range(SIZES[axis]) for axis in axes)):
            where = {**dict(zip(rest, fixed, strict=True)), **dict(zip(axes, moving, strict=True))}
            members.append(tuple(where[axis] for axis in SIZES))
        for member, result in zip(members, reference([x[member] for member in members]), strict=True):
            results[member] = result
    rows = [torch.stack([results[i, j] for j in range(SIZES["b"])]) for i in range(SIZES["a"])]
    return torch.stack(rows)


def pairing(x: Tensor, y: Tensor, state: State, axes: tuple[str, ...]) -> Tensor:
    """The inner product of a value with its gradient: an Invariant value counts once, all others once per rank."""
    total = (x * y).sum(dim=tuple(range(2, x.ndim)))
    for position, axis in reversed(list(enumerate(SIZES))):
        once = state is I and axis in axes
        total = total.select(position, 0) if once else total.sum(position)
    return total


def integers(*shape: int, seed: int) -> Tensor:
    """Integer-valued float64, small enough that all sums here are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(torch.float64)
