"""Plans of saving and restoring: which rank writes which boxes to which file, and which boxes a rank reads."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from sharding_specs import Box, Mesh

from ..errors import CheckpointError, DamagedCheckpointError
from .layouts import LeafLayout, Part, Piece, Writers


class WriteItem(NamedTuple):
    """Box of a leaf that a rank writes. The n-th box of a leaf is in the n-th file of its kind."""

    leaf: LeafLayout
    box: Box
    parts: tuple[Part, ...]
    number: int  # of the file, from 0


class ShardSource(NamedTuple):
    rank: int  # that wrote it
    number: int  # of the file
    box: Box


class ReadItem(NamedTuple):
    leaf: LeafLayout  # as it was saved
    part: Part
    sources: tuple[tuple[ShardSource, Box], ...]  # with the common box


@dataclass(frozen=True)
class SavePlan:
    """Plan of a checkpoint. It has a writer for every box.

    Args:
        mesh: the mesh of the run that saves.
        leaves: the leaves. Their pieces name the writers.
        name: the file that has the plan, for messages.
    """

    mesh: Mesh
    leaves: tuple[LeafLayout, ...]
    name: str = "the plan"

    def rank(self, rank: int) -> list[WriteItem]:
        """Return the boxes that a rank writes, in the order of its files."""
        items = [
            WriteItem(leaf, region.box, region.parts, number)
            for leaf in self.leaves
            for number, region in enumerate(leaf.written(self.mesh, rank))
        ]
        return sorted(items, key=lambda item: (item.leaf.kind, item.number, -item.leaf.dtype.itemsize))

    def sources(self, leaf: LeafLayout, box: Box) -> Iterator[tuple[ShardSource, Box]]:
        """Yield the written boxes of a leaf that have elements of a box, each with the common box."""
        for rank in leaf.writers(box, self.mesh):
            for number, written in enumerate(self._written(leaf, rank)):
                common = written.intersection(box)
                if common is not None:
                    yield ShardSource(rank, number, written), common

    @cached_property
    def _written(self) -> Callable[[LeafLayout, int], tuple[Box, ...]]:
        """The boxes of a leaf that a rank wrote. The last are cached, because a rank reads neighbouring boxes."""
        return lru_cache(4096)(lambda leaf, rank: tuple(region.box for region in leaf.written(self.mesh, rank)))


def plan_save(leaves: Sequence[LeafLayout], mesh: Mesh) -> SavePlan:
    """Choose the rank that writes each piece, so that ranks with equal pieces share the work.

    Of the pieces that the same ranks hold, the largest come first, and each is given to the rank with the fewest bytes
    of them. So of these pieces none writes more than its fair share and one box.

    >>> import torch
    >>> from sharding_specs import P
    >>> pieces = (Piece(P("tensor")),)
    >>> leaves = [LeafLayout("params", name, (4, 8), torch.float32, pieces) for name in ("a", "b")]
    >>> plan = plan_save(leaves, Mesh(data=2, tensor=2))
    >>> [[(item.leaf.key, item.box.start) for item in plan.rank(rank)] for rank in range(4)]
    [[('a', (0, 0))], [('a', (2, 0))], [('b', (0, 0))], [('b', (2, 0))]]

    Args:
        leaves: the leaves of the state.
        mesh: the mesh.
    """
    every = ((i, j, leaf, piece) for i, leaf in enumerate(leaves) for j, piece in enumerate(leaf.pieces))
    order = sorted((*_kind_and_order(leaf, piece, mesh), i, j) for i, j, leaf, piece in every)
    loads: dict[str, list[tuple[int, int, int]]] = {}  # per kind a heap: bytes, order among equals, index of the rank
    writers: dict[tuple[int, int], Writers] = {}
    for turn, (kind, size, i, j) in enumerate(order):
        if kind not in loads:  # the first pieces of the kinds go to different ranks
            copies = leaves[i].pieces[j].copies(mesh)
            loads[kind] = [(0, number, (turn + number) % copies) for number in range(copies)]
        load, number, index = loads[kind][0]
        heapq.heapreplace(loads[kind], (load - size, number, index))
        writers[i, j] = Writers((), (index,))
    found = []
    for i, leaf in enumerate(leaves):
        pieces = (replace(piece, writers=writers[i, j]) for j, piece in enumerate(leaf.pieces))
        found.append(replace(leaf, pieces=tuple(pieces)))
    return SavePlan(mesh, tuple(found))


def _kind_and_order(leaf: LeafLayout, piece: Piece, mesh: Mesh) -> tuple[str, int]:
    """Return the ranks that hold the same of a piece, with the slice of a vector in which it begins, and -bytes."""
    vector, shape = piece.vector, leaf.shape if piece.rows is None else leaf.shape[1:]
    begins = None if vector is None else vector.begin * mesh.axis_size(vector.over) // vector.length
    axes = [*piece.spec.dim_axes(), *[()] * len(shape)]
    elements = math.prod(-(-size // mesh.axis_size(names)) for size, names in zip(shape, axes, strict=False))
    return f"{piece.replicas(mesh)} {begins}", -elements * leaf.dtype.itemsize * len(piece.held)


@dataclass(frozen=True)
class RestorePlan:
    saved: SavePlan  # that wrote the checkpoint
    leaves: tuple[tuple[LeafLayout, LeafLayout], ...]  # as they are wanted, and as they were saved
    mesh: Mesh  # of the run that restores

    def rank(self, rank: int) -> Iterator[ReadItem]:
        """Yield the reads of a rank. Saved boxes must cover a leaf exactly once."""
        coordinates = self.mesh.coordinates(rank)
        for leaf, saved in self.leaves:
            for piece in leaf.pieces:
                for region in leaf.regions(piece, self.mesh, coordinates):
                    for part in region.parts:
                        box = part.box.intersection(Box((0,) * len(saved.shape), saved.shape))
                        sources = () if box is None else tuple(self.saved.sources(saved, box))
                        found = sum(common.numel for _, common in sources)
                        if box is not None and found != box.numel:
                            raise DamagedCheckpointError(
                                f"{self.saved.name}: {saved}: of the box at {box.start} of {box.size}, "
                                f"{found} of {box.numel} elements were saved: there are gaps or overlaps"
                            )
                        yield ReadItem(saved, part, sources)


def plan_restore(saved: SavePlan, leaves: Sequence[LeafLayout], mesh: Mesh) -> RestorePlan:
    """Return the plan of reading saved leaves into other layouts, by kind and key.

    Args:
        saved: the plan that wrote the checkpoint.
        leaves: the leaves as they are wanted. All must have been saved, with the same number of dims. Elements outside
            of the saved shape are not read.
        mesh: the mesh of the run that restores.

    Raises:
        CheckpointError: if a leaf was not saved, or has another number of dims.
    """
    by_name = {(leaf.kind, leaf.key): leaf for leaf in saved.leaves}
    pairs = []
    for leaf in leaves:
        found = by_name.get((leaf.kind, leaf.key))
        if found is None or len(found.shape) != len(leaf.shape):
            held = "is not in the checkpoint" if found is None else f"has shape {found.shape} in the checkpoint"
            raise CheckpointError(f"{leaf} of shape {leaf.shape} {held}")
        pairs.append((leaf, found))
    return RestorePlan(saved, tuple(pairs), mesh)
