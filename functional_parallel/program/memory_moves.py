"""Moves of a program between memories, with their bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import fx

from ..ir import Aval, Source, Traced, info
from ..ops import is_move, kind_of_memory, moved_value
from .memories import memories_of
from .traffic import phases_of


@dataclass(frozen=True)
class MemoryMove:
    """One move of a program between two memories."""

    source: str  # the memory of the operand
    target: str
    operand: Aval
    line: Source | None
    phase: str  # "forward", "backward" or "update"
    node: fx.Node
    parameters: tuple[str, ...] = ()  # paths, if it moves parameters or their gradients

    @property
    def bytes(self) -> int:
        return self.operand.nbytes

    @property
    def kind(self) -> str:
        return f"{self.source} → {self.target}"


def moves_of(traced: Traced) -> Iterator[MemoryMove]:
    memories = memories_of(traced)
    for node, phase in phases_of(traced).items():
        if is_move(node):
            known, line = info(node), info(node).used_at or info(node).source
            link = kind_of_memory(memories[moved_value(node)]), kind_of_memory(memories[node])
            yield MemoryMove(*link, known.aval, line, phase, node, known.parameters)


def bytes_of_moves(found: Iterable[MemoryMove]) -> dict[tuple[str, str], int]:
    sums: Counter[tuple[str, str]] = Counter()
    for one in found:
        sums[one.source, one.target] += one.bytes
    return dict(sums)
