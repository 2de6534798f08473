"""How long a schedule takes at least, from what its actions took."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from functional_parallel.schedules import Action, Costs, Event, Schedule, simulate

__all__ = ["costs_of", "ends", "ordinary"]


def ordinary(steps: Iterable[Sequence[Event]]) -> list[Event]:
    """Every action once, as long as it was in the median of all steps: what held one up does not count."""
    times: dict[tuple[int, Action], list[float]] = defaultdict(list)
    for events in steps:
        for rank, action, start, end in events:
            times[rank, action].append(end - start)
    return [Event(rank, action, 0.0, statistics.median(each)) for (rank, action), each in times.items()]


def ends(schedule: Schedule, events: Sequence[Event], rests: Sequence[float]) -> float:
    """When the last rank is done, if messages take no time and each has something else to do beside its actions.

    Args:
        schedule: what runs.
        events: of every action, how long it takes.
        rests: per rank, seconds.
    """
    timeline = simulate(schedule, costs_of(schedule, events))
    return max(row[-1].end + rest for row, rest in zip(timeline.events, rests, strict=True))


def costs_of(schedule: Schedule, events: Sequence[Event], latency: float = 0.0) -> Costs:
    """Each stage's own mean times of F, B, I and W, for the simulator.

    Args:
        schedule: what ran.
        events: when each action ran, of all ranks.
        latency: what a message takes.
    """
    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _, action, start, end in events:
        times[action.kind, action.stage].append(end - start)
    stages = range(schedule.stages)
    of = {kind: [statistics.mean(times.get((kind, stage), [0.0])) for stage in stages] for kind in "FBIW"}
    # Where a schedule has B in one piece, the simulator is given it as an input gradient and no weight gradient.
    return Costs(of["F"], [i + b for i, b in zip(of["I"], of["B"], strict=True)], of["W"], latency=latency)
