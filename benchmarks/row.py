"""What is reported of one pair, from what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import report

__all__ = ["CHECKED_STEPS", "row_of", "turns_of"]

CHECKED_STEPS = 5
_WARM_UP = 2


def turns_of(count: int, rounds: int) -> Iterator[tuple[int, int, int]]:
    """Who of several is next, in an order that turns round; the number of its step, and where to note what it takes.

    Rounds to warm up come first, and what is noted of them is overwritten.
    """
    for index in range(-_WARM_UP, rounds):
        for which in range(count) if index % 2 else reversed(range(count)):
            yield which, CHECKED_STEPS + index, max(index, 0)


def row_of(
    settings: dict[str, Any],
    ranks: int,
    times: list[list[float]],
    work: list[list[float]],
    losses: list[tuple[float, float]],
    worst: float,
) -> dict[str, Any]:
    """A row.

    Args:
        settings: the pair's name and size.
        ranks: how many.
        times: seconds of the slowest rank in every round: ours, the peer's, one plain step; with bounds, our staged
            one too, a plain one on every rank at once, and ours without communication.
        work: processor seconds of all ranks, likewise.
        losses: of the first steps, ours and the peer's.
        worst: the largest difference of a gradient, as a share of that gradient's largest element.
    """
    ours, peer, single, *bounds = (statistics.median(series) for series in times)
    our_work, peer_work, *_ = (statistics.median(series) for series in work)
    bound = dict(zip(("staged_single_s", "at_once_s", "quiet_s"), bounds, strict=False))
    if bound:
        bound["at_once_ratio"], bound["peer_at_once_ratio"] = (s * ranks / bound["at_once_s"] for s in (ours, peer))
    return {
        "name": settings["name"],
        "config": settings["size"],
        "ranks": ranks,
        "ours_s": ours,
        "peer_s": peer,
        "ratio": ours / peer,
        "quartiles": report.spread([a / b for a, b in zip(times[0], times[1], strict=True)]),
        "work_ratio": our_work / peer_work,
        "single_s": single,
        **bound,
        "ideal_ratio": ours * ranks / single,
        "peer_ideal_ratio": peer * ranks / single,
        "gradients_differ_by": worst,
        "losses_equal": worst <= 1e-4 and all(abs(a - b) <= 1e-5 * abs(b) for a, b in losses),
    }
