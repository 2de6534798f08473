"""Memory of each rank of a pipeline, as a table with one row per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..program import MEMORY_KINDS, MemoryUse, columns, draw, extra_memory
from ..quantities import readable_bytes

PIPELINE_KINDS = (*MEMORY_KINDS, "messages")


@dataclass(frozen=True)
class PipelineMemory:
    """Bytes of live tensors on the ranks of a pipeline. Print it to get a table.

    Attributes:
        name: the name of the program.
        axis: the mesh axis of the pipeline.
        ranks: for each rank along the axis, the memory of one rank along the other axes. A point of its curve is a
            program, message or exchange.
    """

    name: str
    axis: str
    ranks: tuple[MemoryUse, ...]

    @property
    def fullest(self) -> MemoryUse:
        """Memory of the rank with the highest peak; of several, the first."""
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def peak(self) -> int:
        """Maximum of live bytes on any rank."""
        return self.fullest.peak

    @property
    def peaks(self) -> dict[str, int]:
        """Maximum of live bytes on any rank, of each memory that the program uses."""
        return _largest([rank.peaks for rank in self.ranks])

    @property
    def peaks_in_flight(self) -> dict[str, int]:
        """The same while moves run beside the ops: the values that a move copies live until a rank waits for it."""
        return _largest([rank.peaks_in_flight for rank in self.ranks])

    @property
    def shared(self) -> int:
        """Maximum of additional shared-memory bytes on any rank, if the ranks are processes with gloo."""
        return max(rank.shared for rank in self.ranks)

    @property
    def alive(self) -> dict[str, int]:
        """Bytes of each kind at the peak of the fullest rank."""
        return self.fullest.alive

    @property
    def largest(self) -> tuple[tuple[int, str, str], ...]:
        """Largest values at the peak of the fullest rank: bytes, description, source line."""
        return self.fullest.largest

    def to_dict(self) -> dict[str, Any]:
        """Return the memory as plain data."""
        ranks = [rank.to_dict() for rank in self.ranks]
        return {"name": self.name, "axis": self.axis, "peak": self.peak, "shared": self.shared, "ranks": ranks}

    def __str__(self) -> str:
        number, fullest = self.ranks.index(self.fullest), self.fullest
        kinds = [kind for kind in PIPELINE_KINDS if any(rank.alive.get(kind) for rank in self.ranks)]
        rows = [("rank", "peak", *kinds, "reached in")]
        for index, rank in enumerate(self.ranks):
            sizes = (readable_bytes(rank.alive.get(kind, 0)) for kind in kinds)
            rows.append((str(index), readable_bytes(rank.peak), *sizes, rank.ops[rank.at]))
        lines = [
            f"{self.name}: at most {readable_bytes(self.peak)} of tensors on a rank, rank {number} of {self.axis!r}"
        ]
        lines += columns(rows, right=tuple(range(len(kinds) + 2)))
        lines += [said] if (said := extra_memory.current().note(self.shared)) else []
        lines += [f"the largest on rank {number}, {fullest.ops[fullest.at]}"]
        lines += [f"  {readable_bytes(size):>10}  {what:24}  {where}".rstrip() for size, what, where in self.largest]
        in_flight = {name: readable_bytes(peak) for name, peak in self.peaks_in_flight.items()}
        others = [
            f"memory {name!r}: at most {readable_bytes(peak)}, with moves in flight {in_flight[name]}"
            for name, peak in self.peaks.items()
            if len(in_flight) > 1
        ]
        return "\n".join([*lines, *others])

    def plot(self, path: str | Path) -> None:
        """Draw the curves of all ranks. Needs matplotlib."""
        curves = {f"{self.axis} {index}": rank.curve for index, rank in enumerate(self.ranks)}
        draw(path, self.name, curves, self.peak, "program")


def _largest(ranks: Sequence[dict[str, int]]) -> dict[str, int]:
    names = dict.fromkeys(name for peaks in ranks for name in peaks)
    return {name: max(peaks.get(name, 0) for peaks in ranks) for name in names}
