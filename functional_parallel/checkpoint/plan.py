"""Plans of saving and restoring: which rank writes which boxes to which file, and which boxes a rank reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

from sharding_specs import Box, Mesh

from ..errors import CheckpointError, DamagedCheckpointError
from .layouts import LeafLayout, Part, Piece, Writers

_ROUNDS = 3


class WriteItem(NamedTuple):
    """Box of a leaf that a rank writes. The n-th box of a leaf is in the n-th file of its kind."""

    leaf: LeafLayout
    box: Box
    parts: tuple[Part, ...]
    number: int  # of the file, from 0


class Source(NamedTuple):
    rank: int  # that wrote it
    number: int  # of the file
    box: Box


class ReadItem(NamedTuple):
    """Box of a held tensor, and the boxes in files that have its elements."""

    leaf: LeafLayout  # as it was saved
    part: Part
    sources: tuple[tuple[Source, Box], ...]  # with the common box


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

    def sources(self, leaf: LeafLayout, box: Box) -> Iterator[tuple[Source, Box]]:
        """Yield the written boxes of a leaf that have elements of a box, each with the common box."""
        for rank in leaf.writers(box, self.mesh):
            for number, written in enumerate(self._written(leaf, rank)):
                common = written.intersection(box)
                if common is not None:
                    yield Source(rank, number, written), common

    @cached_property
    def _written(self) -> Callable[[LeafLayout, int], tuple[Box, ...]]:
        """The boxes of a leaf that a rank wrote. The last ones are kept, because a rank reads neighbouring boxes."""
        return lru_cache(4096)(lambda leaf, rank: tuple(region.box for region in leaf.written(self.mesh, rank)))


def plan_save(leaves: Sequence[LeafLayout], mesh: Mesh) -> SavePlan:
    """Choose the rank that writes each piece, so that ranks with equal pieces share the work.

    A piece is given to the rank with the fewest bytes. Pieces that few ranks hold come first, and then large ones. The
    largest rank writes at most its fair share and one box.

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
    work = _Work(mesh)
    every = [(i, j, piece) for i, leaf in enumerate(leaves) for j, piece in enumerate(leaf.pieces)]
    jobs = [(i, j, _Job.of(piece, _bytes(leaves[i], piece, mesh), mesh)) for i, j, piece in every]
    jobs.sort(key=lambda each: (each[2].copies, -int(each[2].sizes.max())))
    kinds = {tuple(job.choices.items()) for _, _, job in jobs if job.copies > 1}
    for _ in range(_ROUNDS if len(kinds) > 1 else 1):  # the first are given again, now that the other loads are known
        for _, _, job in jobs:
            work.assign(job)
    chosen = {(i, j): job.writers(mesh) for i, j, job in jobs}
    found = []
    for i, leaf in enumerate(leaves):
        pieces = (replace(piece, writers=chosen[i, j]) for j, piece in enumerate(leaf.pieces))
        found.append(replace(leaf, pieces=tuple(pieces)))
    return SavePlan(mesh, tuple(found))


def _bytes(leaf: LeafLayout, piece: Piece, mesh: Mesh) -> torch.Tensor:
    shape = leaf.shape if piece.rows is None else leaf.shape[1:]
    held = torch.full([1] * len(mesh.axis_names), leaf.dtype.itemsize * len(piece.held), device="cpu")
    if piece.vector is not None:
        over, length = piece.vector.over, piece.vector.length // mesh.axis_size(piece.vector.over)
        starts, count = torch.arange(mesh.axis_size(over), device="cpu") * length - piece.vector.begin, math.prod(shape)
        count //= math.prod(mesh.axis_size(axis) for axis in piece.spec.axes)
        inside = (starts + length).clamp(max=count) - starts.clamp(min=0)
        return held * _in_mesh(inside.clamp(min=0), over, mesh)
    axes = [*piece.spec.dim_axes(), *[()] * len(shape)]
    for size, names in zip(shape, axes, strict=False):
        ranks = mesh.axis_size(names)
        block = -(-size // ranks)
        lengths = (size - torch.arange(ranks, device="cpu") * block).clamp(
            0, block
        )  # the last ranks have less, or only padding
        held = held * (block if size % ranks == 0 else _in_mesh(lengths, names, mesh))
    return held


def _in_mesh(values: torch.Tensor, axes: Sequence[str], mesh: Mesh) -> torch.Tensor:
    names = mesh.axis_names
    order = sorted(range(len(axes)), key=lambda dim: names.index(axes[dim]))
    values = values.view([mesh.axis_size(axis) for axis in axes]).permute(order)
    return values.reshape([mesh.axis_size(axis) if axis in axes else 1 for axis in names])


@dataclass
class _Job:
    choices: dict[str, Sequence[int]]  # indices of the ranks that hold the same, by axis
    sizes: torch.Tensor
    copies: int
    best: torch.Tensor | None = None  # index of the writer, for each coordinate of the split; in the dims of the mesh
    added: torch.Tensor | None = None  # bytes per rank, of the ranks of `choices`

    @classmethod
    def of(cls, piece: Piece, sizes: torch.Tensor, mesh: Mesh) -> _Job:
        choices = dict(piece.replicas(mesh))
        return cls(choices, sizes, math.prod(map(len, choices.values())))

    def writers(self, mesh: Mesh) -> Writers:
        assert self.best is not None
        if len(self.best.unique()) == 1:
            return Writers((), (int(self.best.flatten()[0]),))
        axes = [axis for axis, length in zip(mesh.axis_names, self.best.shape, strict=True) if length > 1]
        return Writers(tuple(axes), tuple(self.best.flatten().tolist()))


class _Work:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.loads = torch.zeros([1] * len(mesh.axis_names), dtype=torch.int64, device="cpu")

    def assign(self, job: _Job) -> None:
        names = self.mesh.axis_names
        wanted = [self.mesh.axis_size(axis) if axis in job.choices else 1 for axis in names]
        self.loads = self.loads.expand(torch.broadcast_shapes(self.loads.shape, job.sizes.shape, wanted)).clone()
        sizes = zip(names, self.loads.shape, strict=True)
        indices = [torch.tensor(job.choices.get(axis, range(size)), device="cpu") for axis, size in sizes]
        places = torch.meshgrid(*indices, indexing="ij") if indices else ()  # of the ranks that hold the piece
        if job.added is not None:
            self.loads[places] -= job.added
        order = sorted(range(len(names)), key=lambda dim: names[dim] in job.choices)  # the axes of replicas last
        back = sorted(range(len(names)), key=order.__getitem__)
        table = self.loads[places].permute(order)
        kept = table.shape[: len(names) - len(job.choices)]
        best = table.reshape(*kept, -1).argmin(-1)
        one = torch.zeros_like(best).view(-1, 1).repeat(1, job.copies).scatter_(1, best.view(-1, 1), 1)
        job.added = one.view(table.shape).permute(back) * job.sizes
        job.best = best.view([*kept, *[1] * len(job.choices)]).permute(back)
        self.loads[places] += job.added


@dataclass(frozen=True)
class RestorePlan:
    saved: SavePlan  # that wrote the checkpoint
    leaves: tuple[tuple[LeafLayout, LeafLayout], ...]  # as they are wanted, and as they were saved
    mesh: Mesh  # of the run that restores

    def rank(self, rank: int) -> Iterator[ReadItem]:
        """Yield what a rank reads. Saved boxes must cover a leaf exactly once."""
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
