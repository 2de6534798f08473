"""Collectives as compositions of each other: equal values and equal gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from functional_parallel import collectives as fp

from .cases import AXES, SHAPE, SIZES, integers, over_mesh

Program = Callable[[Tensor, tuple[str, ...]], Tensor]


def every_rank(tree: Tensor, axes: tuple[str, ...]) -> Tensor:
    return fp.pvary(tree, axes)


IDENTITIES: dict[str, tuple[Program, Program]] = {
    "all_reduce = reduce, then broadcast": (
        lambda x, axes: every_rank(fp.psum(x, axes), axes),
        lambda x, axes: every_rank(fp.broadcast(fp.reduce(x, axes, root=1), axes, source=1), axes),
    ),
    "all_reduce = reduce_scatter, then all_gather": (
        lambda x, axes: every_rank(fp.psum(x, axes), axes),
        lambda x, axes: fp.all_gather(fp.psum_scatter(x, axes, 1), axes, 1),
    ),
    "psum_scatter = psum, then pscatter": (
        lambda x, axes: fp.psum_scatter(x, axes, 1),
        lambda x, axes: fp.pscatter(fp.psum(x, axes), axes, 1),
    ),
    "all_gather = gather, then broadcast": (
        lambda x, axes: fp.all_gather(x, axes, 1),
        lambda x, axes: every_rank(fp.broadcast(fp.gather(x, axes, 1, 1), axes, 1), axes),
    ),
    "scatter after gather = identity": (
        lambda x, axes: x,
        lambda x, axes: fp.scatter(fp.gather(x, axes, 1, 1), axes, 1, 1),
    ),
    "pscatter after all_gather = identity": (
        lambda x, axes: x,
        lambda x, axes: fp.pscatter(fp.all_gather(x, axes, to="invariant"), axes),
    ),
    "all_to_all and back = identity": (
        lambda x, axes: x,
        lambda x, axes: fp.all_to_all(fp.all_to_all(x, axes, 0, 1), axes, 1, 0),
    ),
    "ppermute and back = identity": (
        lambda x, axes: x,
        lambda x, axes: fp.ppermute(fp.ppermute(x, axes, around(axes, 1)), axes, around(axes, -1)),
    ),
    "broadcast = psum of the source's alone": (
        lambda x, axes: every_rank(fp.broadcast(x, axes, 1), axes),
        lambda x, axes: every_rank(fp.psum(torch.where(fp.axis_index(axes) == 1, x, 0.0), axes), axes),
    ),
    "psum over two axes = one after the other": (
        lambda x, axes: every_rank(fp.psum(x, axes), axes),
        lambda x, axes: every_rank(one_by_one(fp.psum, x, axes), axes),
    ),
    "psum_scatter of partial sums = psum_scatter": (
        lambda x, axes: fp.psum_scatter(x, axes),
        lambda x, axes: fp.apply_primitive("psum_scatter", fp.pcast(x, axes, to="unreduced"), axes, 0, "unreduced"),
    ),
    "gathering to Reduced, then varying = gathering to Varying": (
        lambda x, axes: fp.all_gather(x, axes),
        lambda x, axes: fp.pcast(fp.all_gather(x, axes, to="reduced"), axes, to="varying", src="reduced"),
    ),
}


def around(axes: tuple[str, ...], step: int) -> list[tuple[int, int]]:
    size = fp.axis_size(axes)
    return [(rank, (rank + step) % size) for rank in range(size)]


def one_by_one(collective: Callable[..., Tensor], x: Tensor, axes: tuple[str, ...]) -> Tensor:
    for axis in axes:
        x = collective(x, axis)
    return x


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize("axes", AXES, ids="".join)
def test_identity(name: str, axes: tuple[str, ...]) -> None:
    left, right = IDENTITIES[name]
    x = integers(*SIZES.values(), *SHAPE, seed=0)

    def value_and_gradient(program: Program) -> tuple[Tensor, Tensor]:
        def pull(value: Tensor, seed: Tensor) -> Tensor:
            result, backward = torch.func.vjp(lambda v: program(v, axes), value)
            return backward(torch.arange(result.numel(), dtype=x.dtype).reshape(result.shape) + seed)[0]

        seeds = integers(*SIZES.values(), seed=1)
        both = [tuple(SIZES)] * 2
        return over_mesh(lambda v: program(v, axes), both[:1])(x), over_mesh(pull, both)(x, seeds)

    for ours, theirs in zip(value_and_gradient(left), value_and_gradient(right), strict=True):
        assert torch.equal(ours, theirs)
