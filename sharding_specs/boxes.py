"""Boxes of a tensor: the boxes that a rank holds, and the ranks that hold elements of a box."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .blocks import Blocks, lengths, units
from .mesh import Mesh
from .spec import P


class Box(NamedTuple):
    """Box of a tensor: its first index and its size along each dim.

    >>> Box((0, 2), (4, 3)).intersection(Box((2, 0), (4, 4)))
    Box(start=(2, 2), size=(2, 2))

    Args:
        start: first index along each dim.
        size: size along each dim.
    """

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """Return the box of the common elements; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stops = map(min, self._stop(), other._stop())
        size = tuple(stop - first for first, stop in zip(start, stops, strict=True))
        return None if any(length <= 0 for length in size) else Box(start, size)

    def within(self, other: Box) -> Box:
        """Return the same box with indices relative to the start of another box."""
        return Box(tuple(mine - its for mine, its in zip(self.start, other.start, strict=True)), self.size)

    def cut(self, dim: int, count: int) -> tuple[Box, Box]:
        """Return the first `count` indices of a dim, and the others."""
        start, size = list(self.start), list(self.size)
        start[dim], size[dim] = start[dim] + count, size[dim] - count
        first = (*self.size[:dim], count, *self.size[dim + 1 :])
        return Box(self.start, first), Box(tuple(start), tuple(size))

    def ends(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the positions of the first and the last element in a contiguous tensor of a shape."""
        first = last = 0
        for length, start, count in zip(shape, self.start, self.size, strict=True):
            first, last = first * length + start, last * length + start + count - 1
        return first, last

    def _stop(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.start, self.size, strict=True))


def rank_boxes(shape: Sequence[int], spec: P, mesh: Mesh, coordinates: Mapping[str, int]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of a tensor that a rank holds, without padding, each with its box in the rank's shard.

    >>> next(rank_boxes((8, 2), P("data"), Mesh(data=4), {"data": 1}))
    (Box(start=(2, 0), size=(2, 2)), Box(start=(0, 0), size=(2, 2)))
    >>> [box.start for box, _ in rank_boxes((6,), P((3, "tensor")), Mesh(tensor=2), {"tensor": 1})]
    [(1,), (3,), (5,)]

    Args:
        shape: the global shape.
        spec: spec of the tensor. Dims that its axes do not divide are padded.
        mesh: the mesh.
        coordinates: index of the rank along each axis of the spec.
    """
    factors = [*spec.dims, *[()] * (len(shape) - len(spec.dims))]
    dims = [_ranges(size, dim, mesh, coordinates) for size, dim in zip(shape, factors, strict=True)]
    for ranges in itertools.product(*dims):
        whole, local, size = zip(*ranges, strict=True) if ranges else ((), (), ())
        yield Box(whole, size), Box(local, size)


def _ranges(
    size: int, factors: Sequence[str | Blocks], mesh: Mesh, coordinates: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """Return (start, start in the shard, length) for each range of one dim that a rank holds."""
    if not factors:
        return [(0, 0, size)] if size else []
    blocks = [(0, size, size)]  # begin, stop, length with padding
    for factor in factors:
        blocks = [piece for each in blocks for piece in _cut(*each, factor, mesh, coordinates)]
    found, local = list[tuple[int, int, int]](), 0
    for start, stop, length in blocks:
        if found and sum(found[-1][::2]) == start < stop:  # blocks of an axis with one rank are adjacent
            found[-1] = (*found[-1][:2], stop - found[-1][0])
        elif start < stop:
            found.append((start, local, stop - start))
        local += length
    return found


def _cut(
    begin: int, stop: int, length: int, factor: str | Blocks, mesh: Mesh, coordinates: Mapping[str, int]
) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks, or a rank's slice, of a block: begin, stop, length with padding."""
    count = mesh.axis_size(factor) if isinstance(factor, str) else units(factor)
    unit = -(-length // count)
    starts = (
        [coordinates[factor]] if isinstance(factor, str) else itertools.accumulate(lengths(factor, count), initial=0)
    )
    for start, size in zip(starts, [1] if isinstance(factor, str) else lengths(factor, count), strict=False):
        at = begin + start * unit
        yield at, min(stop, at + size * unit), size * unit


def holders(box: Box, shape: Sequence[int], spec: P, mesh: Mesh) -> Iterator[dict[str, int]]:
    """Yield the coordinates, along the axes of the spec, of the ranks that hold elements of a box.

    The work is proportional to the number of blocks that the box cuts, for any size of the mesh.

    >>> list(holders(Box((3,), (2,)), (8,), P("data"), Mesh(data=4)))
    [{'data': 1}, {'data': 2}]

    Args:
        box: a box of the tensor.
        shape, spec, mesh: as for `rank_boxes`.
    """
    dims = [
        _coordinates(start, length, size, dim, mesh)
        for start, length, size, dim in zip(box.start, box.size, shape, spec.dims, strict=False)
    ]
    for found in itertools.product(*dims):
        yield {axis: index for coordinates in found for axis, index in coordinates}


def _coordinates(
    start: int, length: int, size: int, factors: Sequence[str | Blocks], mesh: Mesh
) -> list[tuple[tuple[str, int], ...]]:
    found: list[tuple[int, int, int, tuple[tuple[str, int], ...]]] = [
        (0, size, size, ())
    ]  # blocks: begin, stop, length with padding, digits
    for factor in factors:
        blocks, found = found, []
        for begin, stop, block, digits in blocks:
            if isinstance(factor, tuple):
                pieces = _cut(begin, stop, block, factor, mesh, {})
                found += [(*each, digits) for each in pieces if each[0] < start + length and start < each[1]]
                continue
            part = -(-block // (mesh.axis_size(factor) if isinstance(factor, str) else factor))
            for digit in range(max(start - begin, 0) // part, -(-(min(stop, start + length) - begin) // part)):
                own = ((factor, digit),) if isinstance(factor, str) else ()
                at = begin + digit * part
                found.append((at, min(stop, at + part), part, (*digits, *own)))
    return list(dict.fromkeys(digits for *_, digits in found))


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> list[tuple[int, Box]]:
    """Cut a range of the elements of a tensor, in row-major order, into boxes: at most 2n - 1 for n dims.

    >>> boxes_of_run((4, 3), 2, 10)
    [(2, Box(start=(0, 2), size=(1, 1))), (3, Box(start=(1, 0), size=(2, 3))), (9, Box(start=(3, 0), size=(1, 1)))]

    Args:
        shape: shape of the tensor.
        start, stop: the first element and the one after the last.

    Returns:
        The first element of each box, and the box.
    """
    if start >= stop:
        return []
    if not shape:
        return [(start, Box((), ()))]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # full rows
    if first > last:  # within one row
        return _in_row(shape, last, start, stop)
    middle = []
    if first < last:
        middle = [(first * row, Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))]
    return [
        *_in_row(shape, first - 1, start, first * row),
        *middle,
        *_in_row(shape, last, last * row, stop),
    ]


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[tuple[int, Box]]:
    begin = row * math.prod(shape[1:])
    found = boxes_of_run(shape[1:], start - begin, stop - begin)
    return [(begin + at, Box((row, *box.start), (1, *box.size))) for at, box in found]
