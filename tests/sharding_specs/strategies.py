"""Random meshes, specs and tensors that fit each other."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from sharding_specs import Mesh, P

NAMES = ("pipe", "data", "tensor")


@st.composite
def meshes(draw: st.DrawFn, most_ranks: int = 8) -> Mesh:
    """Up to three axes in any order, sizes 1 to 4, up to so many ranks."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(0, 3))]
    left, sizes = most_ranks, {}
    for name in names:
        sizes[name] = draw(st.integers(1, min(4, left)))
        left //= sizes[name]
    return Mesh(sizes)


@st.composite
def specs(draw: st.DrawFn, mesh: Mesh, ndim: int, partial: bool = False, blocks: bool = True) -> P:
    """Each axis of the mesh on some dim, in any order, or on none; some dims with a number outside the axes."""
    dims: list[list[str | int]] = [[] for _ in range(ndim)]
    unreduced = set()
    for axis in draw(st.permutations(mesh.axis_names)):
        place = draw(st.integers(-2 if partial else -1, ndim - 1))
        if place >= 0:
            dims[place].append(axis)
        elif place == -2:
            unreduced.add(axis)
    if blocks:
        dims = [[draw(st.sampled_from([1, 1, 2, 3])), *dim] if dim else dim for dim in dims]
    return P(*map(tuple, dims), unreduced=unreduced)


def fitting_shape(draw: st.DrawFn, spec: P, mesh: Mesh, ndim: int) -> tuple[int, ...]:
    """A shape that the spec divides; a dim may be empty."""
    unit = [1] * ndim
    for dim, factors in enumerate(spec.dims):
        unit[dim] = math.prod(mesh.axis_size(factor) if isinstance(factor, str) else factor for factor in factors)
    return tuple(size * draw(st.integers(0 if dim == 0 else 1, 2)) for dim, size in enumerate(unit))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of which every element differs."""
    return torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)


@st.composite
def cases(draw: st.DrawFn, partial: bool = False) -> tuple[Mesh, P, torch.Tensor]:
    """A mesh, a spec on it, and a whole tensor that the spec fits."""
    mesh, ndim = draw(meshes()), draw(st.integers(0, 3))
    spec = draw(specs(mesh, ndim, partial))
    return mesh, spec, numbered(fitting_shape(draw, spec, mesh, ndim))
