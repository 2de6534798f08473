"""Items of a price: the ops, moves and collectives of a rank, and when each runs."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_PRECEDENCE = {"device": 0, "host": 1, "between ranks": 2}  # of what runs at the same time, moves last


@dataclass(frozen=True)
class Item:
    what: str  # "products", "other ops", "host ops", a move, the collective's kind, or "idle" while a pipeline waits
    axes: tuple[str, ...]  # of a collective or a send
    phase: str  # "forward", "backward" or "update"
    source: str  # the source line
    flops: int = 0  # of products
    moved: int = 0  # bytes read and written in memory
    sent: int = 0  # bytes sent to other ranks
    seconds: float = 0.0  # duration without overlap
    exposed: float = 0.0  # seconds when the rank does nothing else
    start: float = 0.0  # seconds since the step began, or the part of a pipeline that it is in
    parameters: tuple[str, ...] = ()  # paths, of a move or a collective of parameters, gradients or state

    @property
    def end(self) -> float:
        return self.start + self.seconds

    @property
    def is_move(self) -> bool:
        return " → " in self.what

    @property
    def lane(self) -> str:
        """Where it runs: "device", "host", the ends of a link, or "between ranks"."""
        if self.axes or self.is_move:
            return "between ranks" if self.axes else self.what
        return "host" if self.what == "host ops" else "device"


def with_exposed(items: Sequence[Item]) -> Iterator[Item]:
    """Yield items with the seconds of each when nothing runs that precedes it."""
    precedence = [_PRECEDENCE.get(item.lane, 3) for item in items]
    exposed, running = [0.0] * len(items), list[int]()
    starting = deque(sorted(range(len(items)), key=lambda index: items[index].start))
    edges = sorted({edge for item in items for edge in (item.start, item.end)})
    for begin, end in itertools.pairwise(edges):
        while starting and items[starting[0]].start <= begin:
            running.append(starting.popleft())
        running = [index for index in running if items[index].end > begin]
        if running:
            exposed[min(running, key=precedence.__getitem__)] += end - begin
    for index, item in enumerate(items):
        yield replace(item, exposed=exposed[index] if precedence[index] else item.seconds)
