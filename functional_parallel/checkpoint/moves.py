"""Plan of moving leaves to another layout in memory: a process receives once each element that it does not hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sharding_specs import Box, Mesh

from .layouts import LeafLayout, Part


class Move(NamedTuple):
    leaf: LeafLayout  # as it is held
    sender: int
    source: Part
    receiver: int
    target: Part
    box: Box

    @property
    def nbytes(self) -> int:
        return 0 if self.sender == self.receiver else self.box.numel * self.leaf.dtype.itemsize


@dataclass(frozen=True)
class MovePlan:
    """Plan of moving leaves. It is computed from layouts alone."""

    leaves: tuple[tuple[LeafLayout, LeafLayout], ...]  # as they are wanted, and as they are held
    source: Mesh  # that holds them
    mesh: Mesh  # that will hold them

    def into(self, process: int) -> Iterator[Move]:
        for wanted, held in self.leaves:
            yield from self._into(wanted, held, process)

    def out_of(self, process: int) -> Iterator[Move]:
        for wanted, held in self.leaves:
            for receiver in sorted(self._receivers(wanted, held, process) - {process}):
                yield from (move for move in self._into(wanted, held, receiver) if move.sender == process)

    def parts(self, most: int) -> Iterator[MovePlan]:
        """Yield plans of consecutive leaves, with at most about this number of bytes per process, or of one leaf."""
        found: list[tuple[LeafLayout, LeafLayout]] = []
        size = 0
        for pair in self.leaves:
            nbytes = Box((), pair[1].shape).numel * pair[1].dtype.itemsize // self.mesh.size
            if found and size + nbytes > most:
                yield MovePlan(tuple(found), self.source, self.mesh)
                found, size = [], 0
            found.append(pair)
            size += nbytes
        if found:
            yield MovePlan(tuple(found), self.source, self.mesh)

    def _into(self, wanted: LeafLayout, held: LeafLayout, process: int) -> Iterator[Move]:
        coordinates = _coordinates(self.mesh, process)
        if coordinates is None:
            return
        for piece in wanted.pieces:
            for region in wanted.regions(piece, self.mesh, coordinates):
                for target in region.parts:
                    for sender, source, box in self._sources(held, target.box, process):
                        yield Move(held, sender, source, process, target, box)

    def _sources(self, held: LeafLayout, box: Box, process: int) -> Iterator[tuple[int, Part, Box]]:
        """Yield the boxes with the elements of a box: of the process itself, or of ranks that share the work."""
        own = _coordinates(self.source, process)
        for piece, coordinates in held.split_coordinates(box, self.source):
            rank = piece.rank_of(process, coordinates, self.source)
            if own is not None and piece.is_held(own) and all(own[axis] == coordinates[axis] for axis in piece.axes):
                rank = self.source.rank(own)
            for region in held.regions(piece, self.source, self.source.coordinates(rank)):
                for source in region.parts:
                    common = source.box.intersection(box)
                    if common is not None:
                        yield self.source.processes[rank], source, common

    def _receivers(self, wanted: LeafLayout, held: LeafLayout, process: int) -> set[int]:
        coordinates, found = _coordinates(self.source, process), set[int]()
        if coordinates is None:
            return found
        for piece in held.pieces:
            for region in held.regions(piece, self.source, coordinates):
                for target, split in wanted.split_coordinates(region.box, self.mesh):
                    ranks = (target.rank_of(index, split, self.mesh) for index in range(target.copies(self.mesh)))
                    found.update(self.mesh.processes[rank] for rank in ranks)
        return found


def _coordinates(mesh: Mesh, process: int) -> dict[str, int] | None:
    processes: Sequence[int] = mesh.processes
    return mesh.coordinates(processes.index(process)) if process in processes else None
