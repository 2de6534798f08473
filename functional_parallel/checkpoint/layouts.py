"""Layouts of saved leaves: the boxes of each leaf that a rank holds, and the rank that writes each box."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from sharding_specs import Box, Mesh, P, boxes_of_run, holders, local_shape, rank_boxes

Coordinates = Mapping[str, int]


class Part(NamedTuple):
    box: Box  # of the leaf
    held: int  # index of the held tensor
    run: tuple[int, tuple[int, ...]] | None  # first element, and shape, of a range of a vector
    local: Box  # of the rank's shard, or of that range

    def view(self, shard: torch.Tensor) -> torch.Tensor:
        if not self.box.numel:
            return shard.new_empty(self.box.size)
        if self.run is not None:
            begin, shape = self.run
            shard = shard.narrow(0, begin, math.prod(shape)).view(shape)
        view = shard[self.local.slices]
        return view if view.ndim == len(self.box.size) else view.unsqueeze(0)


class LeafRegion(NamedTuple):
    """Box of a leaf on one rank, and the boxes in single held tensors that it consists of, along dim 0."""

    box: Box
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Vector:
    """Position of a shard in a flat vector: it begins at element `begin`, and the axes `over` cut the vector."""

    over: tuple[str, ...]  # outermost first
    begin: int
    length: int  # of the vector, before the cut

    def range_of(self, index: int, mesh: Mesh) -> tuple[int, int]:
        """Return the elements of the shard that slice `index` of the vector has; they may be outside the shard."""
        size = self.length // mesh.axis_size(self.over)
        return index * size - self.begin, (index + 1) * size - self.begin


@dataclass(frozen=True)
class Writers:
    """Index of the rank that writes a piece, among its holders, for each coordinate along some axes."""

    axes: tuple[str, ...] = ()
    index: tuple[int, ...] = (0,)

    def at(self, coordinates: Coordinates, mesh: Mesh) -> int:
        return self.index[_index(self.axes, coordinates, mesh)]


@dataclass(frozen=True)
class Piece:
    """Some rows of a leaf, or the full leaf, and how ranks hold them.

    Args:
        spec: spec of the full leaf, or of one row.
        held: indices of the held tensors: one for each of `rows`, else one.
        rows: rows of the leaf, each in its own held tensor; None if one held tensor has the full leaf.
        vector: the position of the shards in a vector, if they are in one.
        where: indices of the ranks that hold the piece, by axis. Along other axes all ranks hold it.
        writers: the ranks that write it.
    """

    spec: P
    held: tuple[int, ...] = field(default=(0,), compare=False)
    rows: tuple[int, ...] | None = None
    vector: Vector | None = None
    where: tuple[tuple[str, tuple[int, ...]], ...] = ()
    writers: Writers = Writers()

    @cached_property
    def axes(self) -> frozenset[str]:
        return self.spec.axes | frozenset(() if self.vector is None else self.vector.over)

    def replicas(self, mesh: Mesh) -> list[tuple[str, Sequence[int]]]:
        """Return the axes of the piece's replicas, each with the indices of the ranks that hold it."""
        where = dict(self.where)
        sizes = mesh.shape.items()
        return [(axis, where.get(axis, range(size))) for axis, size in sizes if axis not in self.axes]

    def writer(self, coordinates: Coordinates, mesh: Mesh) -> int:
        """Return the rank that writes the shard of the ranks with these coordinates along `axes`."""
        return self.rank_of(self.writers.at(coordinates, mesh), coordinates, mesh)

    def rank_of(self, index: int, coordinates: Coordinates, mesh: Mesh) -> int:
        """Return one of the ranks that hold the same, by its index among them. Indices repeat."""
        found = {axis: coordinates[axis] for axis in self.axes}
        for axis, indices in reversed(self.replicas(mesh)):
            index, place = divmod(index, len(indices))
            found[axis] = indices[place]
        return mesh.rank(found)

    def copies(self, mesh: Mesh) -> int:
        return math.prod(len(indices) for _, indices in self.replicas(mesh))

    def is_held(self, coordinates: Coordinates) -> bool:
        return all(coordinates[axis] in indices for axis, indices in self.where)


@dataclass(frozen=True)
class LeafLayout:
    """Layout of a saved leaf.

    Args:
        kind: "params" or "optimizer", the folder of its files.
        key: its name in the files, unique for its kind.
        shape: the global shape.
        dtype: the dtype.
        pieces: pieces that together are the leaf.
    """

    kind: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def __hash__(self) -> int:
        return hash((self.kind, self.key))  # no other leaf has them

    def __str__(self) -> str:
        return f"{self.kind} {self.key!r}"

    def regions(self, piece: Piece, mesh: Mesh, coordinates: Coordinates) -> Iterator[LeafRegion]:
        """Yield the regions of a piece that the rank with these coordinates holds, in its memory."""
        if not piece.is_held(coordinates):
            return
        for box, local, run in self._boxes(piece, mesh, coordinates):
            if piece.rows is None:
                yield LeafRegion(box, (Part(box, piece.held[0], run, local),))
                continue
            for first, last in _consecutive(piece.rows):
                parts = [
                    Part(Box((piece.rows[i], *box.start), (1, *box.size)), piece.held[i], run, local)
                    for i in range(first, last)
                ]
                yield LeafRegion(Box(parts[0].box.start, (last - first, *box.size)), tuple(parts))

    def _boxes(
        self, piece: Piece, mesh: Mesh, coordinates: Coordinates
    ) -> Iterator[tuple[Box, Box, tuple[int, tuple[int, ...]] | None]]:
        shape = self.shape if piece.rows is None else self.shape[1:]
        found = rank_boxes(shape, piece.spec, mesh, coordinates)
        if 0 in shape:
            empty = Box((0,) * len(shape), shape)
            yield empty, empty, None
        elif piece.vector is None:
            yield from ((box, local, None) for box, local in found)
        else:
            held, shards = list(found), local_shape(shape, piece.spec, mesh)
            start, stop = piece.vector.range_of(_index(piece.vector.over, coordinates, mesh), mesh)
            for at, run in boxes_of_run(shards, max(start, 0), min(stop, math.prod(shards))):
                for box, local in held:
                    common = run.intersection(local)
                    if common is not None:
                        shift = zip(common.start, local.start, box.start, strict=True)
                        whole = Box(tuple(mine - its + begin for mine, its, begin in shift), common.size)
                        yield whole, common.within(run), (at - start, run.size)

    def written(self, mesh: Mesh, rank: int) -> Iterator[LeafRegion]:
        coordinates = mesh.coordinates(rank)
        for piece in self.pieces:
            repeats = 0 in self.shape and any(coordinates[axis] for axis in piece.axes)  # every rank holds nothing
            if not repeats and piece.is_held(coordinates) and piece.writer(coordinates, mesh) == rank:
                yield from self.regions(piece, mesh, coordinates)

    def writers(self, box: Box, mesh: Mesh) -> list[int]:
        pairs = self.split_coordinates(box, mesh)
        return list(dict.fromkeys(piece.writer(coordinates, mesh) for piece, coordinates in pairs))

    def split_coordinates(self, box: Box, mesh: Mesh) -> Iterator[tuple[Piece, dict[str, int]]]:
        """Yield each piece with the coordinates, along the axes that split it, of ranks that hold elements of a box."""
        for piece in self.pieces:
            part = box if piece.rows is None else _in_rows(box, piece.rows)
            if part is not None:
                yield from ((piece, coordinates) for coordinates in self._split_coordinates(piece, part, mesh))

    def _split_coordinates(self, piece: Piece, box: Box, mesh: Mesh) -> Iterator[dict[str, int]]:
        shape = self.shape if piece.rows is None else self.shape[1:]
        if 0 in shape:
            yield dict.fromkeys(piece.axes, 0)
            return
        for coordinates in holders(box, shape, piece.spec, mesh):
            if piece.vector is None:
                yield coordinates
            else:
                for index in self._slices(piece, piece.vector, box, mesh, coordinates):
                    yield coordinates | _digits(index, piece.vector.over, mesh)

    def _slices(self, piece: Piece, vector: Vector, box: Box, mesh: Mesh, coordinates: Coordinates) -> range:
        shape = self.shape if piece.rows is None else self.shape[1:]
        shards, size = local_shape(shape, piece.spec, mesh), vector.length // mesh.axis_size(vector.over)
        ends: list[int] = []
        for whole, local in rank_boxes(shape, piece.spec, mesh, coordinates):
            common = whole.intersection(box)
            if common is not None:
                inside = zip(common.start, whole.start, local.start, strict=True)
                held = Box(tuple(its - first + start for its, first, start in inside), common.size)
                ends += [place + vector.begin for place in held.ends(shards)]
        return range(min(ends) // size, max(ends) // size + 1) if ends else range(0)


def _consecutive(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index] != rows[index - 1] + 1:
            yield first, index
            first = index


def _in_rows(box: Box, rows: Sequence[int]) -> Box | None:
    if not any(box.start[0] <= row < box.start[0] + box.size[0] for row in rows):
        return None
    return Box(box.start[1:], box.size[1:])


def _index(axes: Sequence[str], coordinates: Coordinates, mesh: Mesh) -> int:
    found = 0
    for axis in axes:
        found = found * mesh.axis_size(axis) + coordinates[axis]
    return found


def _digits(index: int, axes: Sequence[str], mesh: Mesh) -> dict[str, int]:
    found: dict[str, int] = {}
    for axis in reversed(axes):
        index, found[axis] = divmod(index, mesh.axis_size(axis))
    return found
