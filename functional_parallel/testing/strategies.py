"""Hypothesis strategies for meshes, specs, fitting tensors, pytrees and plans. They need `hypothesis`."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import torch

from sharding_specs import Mesh, P
from sharding_specs.blocks import Blocks, units

from ..errors import ScheduleError
from ..functions import SpecTree
from ..schedules import FAMILIES, Schedule, for_ranks
from ..transforms import Plan, accumulate, chain, pipeline, remat, tensor_parallel, zero

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("fp.testing.strategies needs hypothesis: pip install 'functional-parallel[testing]'") from error

__all__ = ["cases", "fitting_shapes", "integers", "meshes", "numbered", "plans", "pytrees", "specs"]

AXIS_NAMES = ("pipe", "data", "tensor")


@st.composite
def meshes(draw: st.DrawFn, most_ranks: int = 8, names: tuple[str, ...] = AXIS_NAMES) -> Mesh:
    """Strategy for meshes of some of these axes, in any order, with sizes 1 to 4.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: mesh.size == 6).size
    6

    Args:
        most_ranks: bound on the number of ranks.
        names: the axes to choose from.
    """
    chosen = draw(st.permutations(names))[: draw(st.integers(0, len(names)))]
    left, sizes = most_ranks, {}
    for name in chosen:
        sizes[name] = draw(st.integers(1, min(4, left)))
        left //= sizes[name]
    return Mesh(sizes)


_BLOCKS: list[Blocks] = [1, 1, 2, 3, (2, 1), (1, 3, 2)]


@st.composite
def specs(draw: st.DrawFn, mesh: Mesh, ndim: int, partial: bool = False, blocks: bool = True) -> P:
    """Strategy for specs of a mesh: each axis is on some dim, in any order, or on none.

    >>> from hypothesis import find
    >>> mesh = Mesh(data=2, tensor=2)
    >>> find(specs(mesh, 1), lambda spec: spec.axes == {"data", "tensor"}).axes == {"data", "tensor"}
    True

    Args:
        mesh: the mesh.
        ndim: number of dims of the tensors.
        partial: whether an axis may hold partial sums instead.
        blocks: whether a dim with axes may start with a number of outer blocks, or with their sizes.
    """
    dims: list[list[str | Blocks]] = [[] for _ in range(ndim)]
    unreduced = set()
    for axis in draw(st.permutations(mesh.axis_names)):
        place = draw(st.integers(-2 if partial else -1, ndim - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2:
            unreduced.add(axis)
    if blocks:
        dims = [[draw(st.sampled_from(_BLOCKS)), *dim] if dim else dim for dim in dims]
    return P(*map(tuple, dims), unreduced=unreduced)


@st.composite
def fitting_shapes(draw: st.DrawFn, spec: P, mesh: Mesh, ndim: int, least: int = 1) -> tuple[int, ...]:
    """Strategy for shapes that a spec divides.

    Args:
        spec, mesh: the spec and its mesh.
        ndim: the number of dims, at least as in the spec.
        least: minimum number of blocks of a dim; 0 allows empty dims.
    """
    unit = [1] * ndim
    for dim, factors in enumerate(spec.dims):
        unit[dim] = math.prod(mesh.axis_size(each) if isinstance(each, str) else units(each) for each in factors)
    return tuple(size * draw(st.integers(least, 2)) for size in unit)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a float64 tensor with distinct elements.

    >>> numbered((2, 2))
    tensor([[1., 2.],
            [3., 4.]], dtype=torch.float64)
    """
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)


@st.composite
def integers(draw: st.DrawFn, shape: tuple[int, ...], largest: int = 2) -> torch.Tensor:
    """Strategy for float64 tensors of small integers. Their sums and products are exact in any order.

    Args:
        shape: the shape.
        largest: bound on the absolute value.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    return torch.randint(-largest, largest + 1, shape, generator=generator).double()


@st.composite
def cases(draw: st.DrawFn, partial: bool = False) -> tuple[Mesh, P, torch.Tensor]:
    """Strategy for a mesh, a spec on it, and a full tensor that the spec fits; a dim may be empty."""
    mesh, ndim = draw(meshes()), draw(st.integers(0, 3))
    spec = draw(specs(mesh, ndim, partial))
    return mesh, spec, numbered(draw(fitting_shapes(spec, mesh, ndim, least=0)))


def pytrees(leaves: st.SearchStrategy[Any], most_leaves: int = 6) -> st.SearchStrategy[Any]:
    """Strategy for nested dicts, lists and tuples of these leaves.

    >>> from hypothesis import find
    >>> find(pytrees(st.just(0)), lambda tree: isinstance(tree, dict) and bool(tree))
    {'a': 0}
    """
    names = st.sampled_from(["a", "b", "layers", "w"])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.dictionaries(names, inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=most_leaves,
    )


@st.composite
def plans(
    draw: st.DrawFn, tensor_specs: SpecTree = None, most_microbatches: int = 2, most_stages: int = 2
) -> tuple[Plan, Mesh]:
    """Strategy for chains of transforms with a mesh: tensor, data at any ZeRO stage, rematerialisation, microbatches.

    The microbatches are accumulated, or run through a pipeline by any synchronous schedule. The batch's dim 0 must be a
    multiple of 8 · most_microbatches.

    >>> from hypothesis import find
    >>> find(plans(), lambda found: found[1].size == 4)[1].size
    4
    >>> find(plans(), lambda found: "pipe" in found[1].axis_names)[1].axis_size("pipe")
    2

    Args:
        tensor_specs: rules for the axis "tensor"; without them no plan shards tensors.
        most_microbatches: bound on the number of microbatches that are accumulated.
        most_stages: bound on the number of stages of a pipeline, which the function's ops have to allow; with 1, no
            plan has a pipeline.
    """
    data, tensor = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2])) if tensor_specs is not None else 1
    found: list[Any] = []
    if draw(st.booleans()):
        found.append(remat(draw(st.sampled_from(["layers", "nothing"]))))
    if tensor_specs is not None:
        found.append(tensor_parallel("tensor", tensor_specs))
    found.append(zero(draw(st.integers(0, 3)), "data", keep_gathered=draw(st.booleans())))
    if most_stages > 1 and draw(st.booleans()):
        schedule = draw(_schedules(most_stages))
        found.append(pipeline("pipe", schedule=schedule, microbatches=schedule.microbatches))
        return chain(*found), Mesh(pipe=schedule.ranks, data=data, tensor=tensor)
    found.append(accumulate(draw(st.integers(1, most_microbatches))))
    return chain(*found), Mesh(data=data, tensor=tensor)


def _schedules(most_stages: int) -> st.SearchStrategy[Schedule]:
    made: list[Schedule] = []
    for name, microbatches in product(sorted(FAMILIES), (2, 4)):
        try:
            made.append(for_ranks(name, 2, microbatches, chunks=1))
        except ScheduleError:
            continue  # the schedule is not defined for these numbers
    return st.sampled_from([one for one in made if one.versions is None and one.depth <= most_stages])
