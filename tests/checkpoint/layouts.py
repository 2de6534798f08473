"""Random layouts of leaves for tests, and held tensors for them."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from functional_parallel.checkpoint import LeafLayout, Piece, Vector
from sharding_specs import Mesh, P, local_shape, shard_leaf
from sharding_specs.blocks import units

MESHES = [Mesh(data=1), Mesh(data=4), Mesh(data=2, tensor=2), Mesh(pipe=2, data=2), Mesh(pipe=2, data=2, tensor=2)]
MESHES += [Mesh(data=3), Mesh(data=2, tensor=3)]


@st.composite
def specs(draw: Any, rank: int, axes: list[str]) -> P:
    """A spec with some of the axes, several per dim, inner factors included."""
    dims: list[list[Any]] = [[] for _ in range(rank)]
    if rank:
        for axis in draw(st.permutations(axes)):
            if draw(st.booleans()):
                dims[draw(st.integers(0, rank - 1))].append(axis)
        for dim in dims:
            if dim and draw(st.integers(0, 3)) == 0:
                dim.insert(0, draw(st.sampled_from([3, (2, 1)])))
    return P(*map(tuple, dims))


@st.composite
def leaves(draw: Any, mesh: Mesh, key: str, shape: tuple[int, ...]) -> LeafLayout:
    """A leaf in one of the forms in which a step may hold it. Its dims are multiples of 36, or padded."""
    rows: list[tuple[int, ...] | None] = [None]
    if shape and draw(st.booleans()):
        cut = draw(st.integers(0, shape[0]))
        order = list(range(shape[0])) if draw(st.booleans()) else draw(st.permutations(range(shape[0])))
        rows = [tuple(sorted(part)) for part in (order[:cut], order[cut:]) if part]
    pieces, held = [], 0
    for part in rows:
        inner = shape if part is None else shape[1:]
        free = list(mesh.axis_names)
        where: tuple[Any, ...] = ()
        if "pipe" in free and draw(st.booleans()):
            free.remove("pipe")
            where = (("pipe", draw(st.sampled_from([(0,), (1,), (0, 1)]))),)
        spec = draw(specs(len(inner), free))
        for dim, axes in enumerate(spec.dim_axes()):  # only full splits are padded
            if inner[dim] % (
                mesh.axis_size(axes) * math.prod(units(f) for f in spec.dims[dim] if not isinstance(f, str))
            ):
                spec = spec.replace([d if i != dim else axes for i, d in enumerate(spec.dims)])
        spec = spec.fitted(inner, mesh)
        vector = None
        over = [axis for axis in free if axis not in spec.axes]
        if over and not spec.padded and 0 not in inner and draw(st.booleans()):
            over = over[: draw(st.integers(1, len(over)))]
            begin, after = draw(st.integers(0, 7)), draw(st.integers(0, 7))
            unit = mesh.axis_size(over)
            length = begin + math.prod(local_shape(inner, spec, mesh)) + after
            vector = Vector(tuple(over), begin, -(-length // unit) * unit)
        numbers = tuple(range(held, held + (1 if part is None else len(part))))
        held += len(numbers)
        pieces.append(Piece(spec, numbers, part, vector, where))
    return LeafLayout("params", key, shape, torch.float64, tuple(pieces))


def held_tensors(leaf: LeafLayout, mesh: Mesh, rank: int, full: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """What a rank holds of a leaf by the definition of its layout; empty memory if there are no values."""
    coordinates, found = mesh.coordinates(rank), {}
    for piece in leaf.pieces:
        if not piece.is_held(coordinates):
            continue
        for place, held in enumerate(piece.held):
            whole = torch.full(leaf.shape, -1.0, dtype=leaf.dtype) if full is None else full
            row = whole if piece.rows is None else whole[piece.rows[place]]
            shard = shard_leaf(row, piece.spec, mesh, rank, pad=True).contiguous()
            if piece.vector is not None:
                vector = torch.full((piece.vector.length,), -2.0, dtype=leaf.dtype)
                vector[piece.vector.begin : piece.vector.begin + shard.numel()] = shard.flatten()
                over = piece.vector.over
                shard = vector.chunk(mesh.axis_size(over))[mesh.axis_index(rank, over)].clone()
            found[held] = shard
    return found
