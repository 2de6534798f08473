"""Find repeats in a sequence: the layers of a model, in the list of its ops."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Hashable, Sequence
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
        best = _best(tokens[first:end], crossing[first:end], period, stretch)
        if best is not None:
            run = best._replace(start=first + best.start)
            found.append(run)
            open_ += [(first, run.start), (run.end, end)]
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


def _best(tokens: Sequence[Hashable], crossing: Sequence[int], least: int, stretch: int) -> Run | None:
    """Return the longest run of copies; of equal ones, the one with the shortest period."""
    best: Run | None = None
    for period in sorted(_periods(tokens, least)):
        for start, length in _runs(tokens, period):
            copies = (length + period) // period
            if copies * period > (stretch if best is None else best.period * best.copies):
                spare = (length + period) % period
                shift = min(range(spare + 1), key=lambda s: sum(_at(crossing, start + s, period, copies)))
                best = Run(start + shift, period, copies)
    return best


def _at(crossing: Sequence[int], start: int, period: int, copies: int) -> list[int]:
    return [crossing[index] for index in range(start, start + period * copies + 1, period) if index < len(crossing)]


def _periods(tokens: Sequence[Hashable], least: int) -> list[int]:
    last: dict[Hashable, int] = {}
    count = Counter(tokens)
    weights: dict[int, float] = {}
    for index, token in enumerate(tokens):
        distance = index - last.get(token, index)
        if distance >= least:
            weights[distance] = weights.get(distance, 0.0) + 1 / count[token]
        last[token] = index
    return sorted(weights, key=weights.__getitem__, reverse=True)[:_CANDIDATES]


def _runs(tokens: Sequence[Hashable], period: int) -> list[tuple[int, int]]:
    found, start = [], 0
    for index in range(len(tokens) - period + 1):
        if index == len(tokens) - period or tokens[index] != tokens[index + period]:
            if index - start >= period:
                found.append((start, index - start))
            start = index + 1
    return found
