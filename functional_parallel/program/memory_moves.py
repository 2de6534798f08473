"""Moves of a program between memories, with their bytes, and when a rank that moves beside its ops waits for them.

A link is a pair of memories, in one direction. Its moves run one after another. A move is waited for when its result is
needed, or when its link would have too many bytes in flight: the values that it copies stay alive until then.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from ..ir import Aval, Source, Traced, info, operands_of
from ..ops import is_move, kind_of_memory, moved_value
from .aliasing import readers_before_writes
from .memories import memories_of
from .traffic import phases_of

IN_FLIGHT = 64 << 20  # bytes of the moves of a link that run at the same time, or one move
LEAST = 16 << 10  # bytes of a move that is worth a worker


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

    @property
    def is_started(self) -> bool:
        """Whether it runs beside other ops, by the worker of its link."""
        return self.bytes >= LEAST


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


def ended_before(order: Sequence[fx.Node], moves: Collection[MemoryMove]) -> dict[fx.Node, list[fx.Node]]:
    """Map each move to earlier ones of its link that it waits for, to keep the bytes in flight."""
    known, found = {move.node: move for move in moves}, dict[fx.Node, list[fx.Node]]()
    flying: dict[str, deque[MemoryMove]] = defaultdict(deque)
    for node in order:
        if node in known:
            queue = flying[known[node].kind]
            while queue and sum(each.bytes for each in queue) + known[node].bytes > IN_FLIGHT:
                found.setdefault(node, []).append(queue.popleft().node)
            queue.append(known[node])
    return found


def waits_of(traced: Traced, order: Sequence[fx.Node], moves: Collection[MemoryMove]) -> dict[fx.Node, int]:
    """Map each move to the position of the op before which a rank waits for it; after the last op for results."""
    readers, ended = readers_before_writes(traced), ended_before(order, moves)
    found = {move.node: len(order) for move in moves}
    for at in reversed(range(len(order))):
        node = order[at]
        for each in (*operands_of(node), *readers.get(node, ()), *ended.get(node, ())):
            if each in found:
                found[each] = at
    return found
