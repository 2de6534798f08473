"""What is reported of one pair, from what was measured."""

from __future__ import annotations

import statistics
from typing import Any

import report

__all__ = ["CHECKED_STEPS", "row_of"]

CHECKED_STEPS = 5


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
        times: seconds of the slowest rank in every round: ours, the peer's, one plain step, our staged one.
        work: processor seconds of all ranks, likewise.
        losses: of the first steps, ours and the peer's.
        worst: the largest difference of a gradient, as a share of that gradient's largest element.
    """
    ours, peer, single, staged_single = (statistics.median(series) for series in times)
    our_work, peer_work, *_ = (statistics.median(series) for series in work)
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
        "staged_single_s": staged_single,
        "ideal_ratio": ours * ranks / single,
        "peer_ideal_ratio": peer * ranks / single,
        "gradients_differ_by": worst,
        "losses_equal": worst <= 1e-4 and all(abs(a - b) <= 1e-5 * abs(b) for a, b in losses),
    }
