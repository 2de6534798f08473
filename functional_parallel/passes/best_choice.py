"""The cheapest choice for the residuals of a small program, by branch and bound.

A selection whose peak is above the budget is extended by a residual that may wait for the backward at the op of its
peak, in each way. No other extension lowers the peak. The selections are taken in the order of a lower bound of what
their extensions cost (Lawler and Wood, Operations Research 14, 1966), so the first that fits is the cheapest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

from .residual_choices import Residual, ResidualChoices, Selection

LARGEST = 1 << 16  # number of choices of a program that is small
_MOST = 4000  # selections that are looked at


def cheapest(choices: ResidualChoices, budget: int) -> Iterator[Selection]:
    """Yield the selections whose predicted peak is within the budget, cheapest first."""
    count = itertools.count()
    waiting: list[tuple[float, int, Selection, frozenset[Residual] | None]] = []  # None: a result

    def push(selection: Selection, final: frozenset[Residual], least: float) -> None:
        bound = max(least, choices.least(selection, budget, final))
        if bound < math.inf:
            heapq.heappush(waiting, (bound, next(count), selection, final))
        if selection.curve.peak()[0] <= budget:
            heapq.heappush(waiting, (selection.cost(), next(count), selection, None))

    push(choices.select({}), frozenset(), 0)
    while waiting:
        bound, number, selection, final = heapq.heappop(waiting)
        if final is None:
            yield selection
            continue
        if number > _MOST:
            return
        _, at = selection.curve.peak()
        avoidable = choices.avoidable(selection, final)
        for residual in choices.residuals:
            read, needed = selection.curve.wait(residual.members)
            may_lower = read <= at <= needed or residual.number in avoidable
            if may_lower and residual not in selection.ways and residual not in final:
                for way in residual.ways:
                    extended = selection.copy()
                    extended.take(residual, way)
                    push(extended, final, bound)
                final |= {residual}
