"""Find repeats in a sequence: the layers of a model, in the list of its ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

_LEAST_PERIOD = 8
_LEAST_STRETCH = 64  # a shorter one compiles equally fast in one piece
_CANDIDATES = 16


def cuts_between_repeats(tokens: Sequence[Hashable], crossing: Sequence[int]) -> list[int]:
    """Return positions before which to cut, where it costs least, so that repeats become equal pieces."""
    cuts: set[int] = set()
    open_ = [(0, len(tokens))]
    while open_:
        first, end = open_.pop()
        found = _best(tokens[first:end], crossing[first:end])
        if found is not None:
            start, period, copies = found
            inside = [first + start + period * index for index in range(copies + 1)]
            cuts.update(inside)
            open_ += [(first, inside[0]), (inside[-1], end)]
    return sorted(cuts - {0, len(tokens)})


def _best(tokens: Sequence[Hashable], crossing: Sequence[int]) -> tuple[int, int, int] | None:
    """Return start, period and number of copies of the longest run of copies; of equal ones, the shortest period."""
    best: tuple[int, int, int] | None = None
    for period in sorted(_periods(tokens)):
        for start, length in _runs(tokens, period):
            copies = (length + period) // period
            if copies * period > (_LEAST_STRETCH if best is None else best[1] * best[2]):
                spare = (length + period) % period
                shift = min(range(spare + 1), key=lambda s: sum(_at(crossing, start + s, period, copies)))
                best = start + shift, period, copies
    return best


def _at(crossing: Sequence[int], start: int, period: int, copies: int) -> list[int]:
    return [crossing[index] for index in range(start, start + period * copies + 1, period) if index < len(crossing)]


def _periods(tokens: Sequence[Hashable]) -> list[int]:
    last: dict[Hashable, int] = {}
    count = Counter(tokens)
    weights: dict[int, float] = {}
    for index, token in enumerate(tokens):
        distance = index - last.get(token, index)
        if distance >= _LEAST_PERIOD:
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
