"""Shared memory of a host for a program's collectives and messages; none with simulated ranks, nccl and mpi."""

from __future__ import annotations

import math
from collections.abc import Iterable

from sharding_specs import Mesh

from ..collectives import OWNED
from ..program import Collective, ExtraMemory
from ..quantities import readable_bytes
from ..runtime import GATHERED
from .slots import HALF, LARGEST, ROOM, SMALL_HALF, aligned, slot_bytes

_BY_THE_BACKEND = ("ppermute", "pbroadcast", *OWNED)


class SharedMemorySizes(ExtraMemory):
    """Bytes of shared memory that a rank uses beside its tensors."""

    def of_collectives(self, collectives: Iterable[Collective], mesh: Mesh) -> int:
        halves: dict[tuple[str, ...], int] = {}
        for one in collectives:
            if one.kind not in _BY_THE_BACKEND:
                slot = min(HALF, _slot(one, math.prod(map(mesh.axis_size, one.axes))))
                halves[one.axes] = max(halves.get(one.axes, SMALL_HALF), slot)
        return 2 * sum(halves.values())

    def of_messages(self, sizes: Iterable[int]) -> int:
        return min(ROOM, sum(aligned(size) for size in sizes if size <= LARGEST))

    def note(self, size: int) -> str:
        text = f"and at most {readable_bytes(size)} of shared memory, if the ranks are processes with gloo"
        return text if size else ""


def _slot(one: Collective, ranks: int) -> int:
    elements, itemsize = one.operand.numel, one.operand.dtype.itemsize
    if one.kind in ("psum", "all_gather"):
        return slot_bytes(1, elements, itemsize)
    if one.kind in ("psum_scatter", "all_to_all"):
        return slot_bytes(ranks - 1, elements // ranks, itemsize)
    if ranks * one.operand.nbytes <= GATHERED:
        return slot_bytes(1, elements, itemsize)
    part = -(-elements // ranks)
    return max(slot_bytes(ranks - 1, part, itemsize), slot_bytes(1, part, itemsize))
