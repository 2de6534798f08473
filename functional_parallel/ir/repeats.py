"""Find repeats in a sequence: the layers of a model, in the list of its ops."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import NamedTuple

from torch import fx

_LEAST_PERIOD = 8
_LEAST_STRETCH = 64  # a shorter one compiles equally fast in one piece
_CANDIDATES = 16


class Run(NamedTuple):
    """Consecutive equal slices of a sequence."""

    start: int
    period: int
    copies: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.copies


def cuts_between_repeats(tokens: Sequence[Hashable], crossing: Sequence[int]) -> list[int]:
    """Return positions before which to cut, where it costs least, so that repeats become equal pieces."""
    runs = runs_of_repeats(tokens, crossing)
    cuts = {run.start + run.period * index for run in runs for index in range(run.copies + 1)}
    return sorted(cuts - {0, len(tokens)})


def runs_of_repeats(
    tokens: Sequence[Hashable], crossing: Sequence[int], period: int = _LEAST_PERIOD, stretch: int = _LEAST_STRETCH
) -> list[Run]:
    """Return disjoint runs of repeats, in order, with boundaries that few values cross.

    >>> runs_of_repeats("xabcabcabcy", [0] * 11, period=2, stretch=2)
    [Run(start=1, period=3, copies=3)]

    Args:
        tokens: the sequence.
        crossing: for each position, the number of values that are live across it.
        period: least length of a slice.
        stretch: a run is longer than this.
    """
    found: list[Run] = []
    open_ = [(0, len(tokens))]
    while open_:
        first, end = open_.pop()
        inside = tokens[first:end]
        periods = _periods(inside, period)
        runs = (run for each in periods[:_CANDIDATES] for run in _runs(inside, each, first))
        taken = _longest(runs, crossing, stretch)
        found += taken
        if taken and len(periods) > _CANDIDATES:
            bounds = [first, *(bound for run in taken for bound in (run.start, run.end)), end]
            open_ += zip(bounds[::2], bounds[1::2], strict=True)
    return sorted(found)


def crossing_values(nodes: Sequence[fx.Node], returned: Container[fx.Node] = ()) -> list[int]:
    """Return, for each position in consecutive nodes, the number of values that are live across it."""
    position = {node: index for index, node in enumerate(nodes)}
    change = [0] * (len(nodes) + 1)
    for node, index in position.items():
        later = [position[user] for user in node.users if user in position]
        if node in returned:
            later.append(len(nodes) - 1)
        if later:
            change[index + 1] += 1
            change[max(later) + 1] -= 1
    return list(itertools.accumulate(change[:-1]))


def _longest(runs: Iterable[tuple[int, int, int]], crossing: Sequence[int], stretch: int) -> list[Run]:
    """Return disjoint runs, the longest first; of equal ones, the one with the shortest period."""
    found, taken = [], bytearray(len(crossing))
    open_: list[tuple[int, int, int, int]] = []

    def add(period: int, start: int, end: int) -> None:
        covered = (end - start) // period * period
        if covered > max(period, stretch):
            heapq.heappush(open_, (-covered, period, start, end))

    for each in runs:
        add(*each)
    while open_:
        _, period, start, end = heapq.heappop(open_)
        if (first := taken.find(1, start, end)) >= 0:
            rest = taken.find(0, first, end)
            add(period, start, first)
            add(period, rest if rest >= 0 else end, end)
            continue
        copies, spare = divmod(end - start, period)
        shift = min(range(spare + 1), key=lambda s: sum(crossing[start + s : end + 1 : period]))
        found.append(Run(start + shift, period, copies))
        taken[found[-1].start : found[-1].end] = b"\1" * (period * copies)
    return sorted(found)


def _periods(tokens: Sequence[Hashable], least: int) -> list[int]:
    last: dict[Hashable, int] = {}
    count = Counter(tokens)
    weights: dict[int, float] = {}
    for index, token in enumerate(tokens):
        distance = index - last.get(token, index)
        if distance >= least:
            weights[distance] = weights.get(distance, 0.0) + 1 / count[token]
        last[token] = index
    return sorted(weights, key=weights.__getitem__, reverse=True)


def _runs(tokens: Sequence[Hashable], period: int, first: int) -> list[tuple[int, int, int]]:
    found, start = [], 0
    for index in range(len(tokens) - period + 1):
        if index == len(tokens) - period or tokens[index] != tokens[index + period]:
            if index - start >= period:
                found.append((period, first + start, first + index + period))
            start = index + 1
    return found
