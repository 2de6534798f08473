"""Simulation of a schedule: start and end of each action, for given costs of actions and transfers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ScheduleError
from ..quantities import is_non_negative, is_positive
from .actions import Action, Schedule
from .predecessors import receiving_stage, replay_groups

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Costs of actions and transfers. A number applies to every stage; a sequence has one value per stage.

    Args:
        forward, input_gradient, weight_gradient: times of F, I and W. The time of B is the sum of I and W.
        latency: time from the end of a transfer to the arrival of the result on another rank.
        message, bandwidth: size of the output of a stage, and size per unit of time between two ranks.
        overlap: execution of a pair. None runs its actions sequentially. A number runs them as one action. Its time is
            the sum of both minus this fraction of the shorter time. 0 saves nothing; 1 hides the shorter action.
        activation: size of the activations of a forward until they are released.
        kept_by_weight_gradient: fraction of the activations that stays alive between I and W.
        jitter, seed: largest relative change of a time, and seed of the random changes. Each action has its own change.

    Raises:
        ScheduleError: for a negative time or size, a bandwidth of 0, or a fraction outside [0, 1].
    """

    forward: PerStage = 1.0
    input_gradient: PerStage = 1.0
    weight_gradient: PerStage = 1.0
    latency: float = 0.0
    message: PerStage = 0.0
    bandwidth: float = 1.0
    overlap: float | None = None
    activation: PerStage = 1.0
    kept_by_weight_gradient: float = 1.0
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("forward", "input_gradient", "weight_gradient", "latency", "message", "activation"):
            given = getattr(self, name)
            for value in given if isinstance(given, Sequence) and not isinstance(given, str) else [given]:
                _require(name, value, is_non_negative(value), "0 or more")
        for name in ("overlap", "kept_by_weight_gradient", "jitter"):
            share = getattr(self, name)
            nothing = name == "overlap" and share is None
            _require(name, share, nothing or (is_non_negative(share) and share <= 1), "from 0 to 1")
        _require("bandwidth", self.bandwidth, is_positive(self.bandwidth), "more than 0")

    def time(self, action: Action) -> float:
        """Return the time of an action, without jitter."""
        stage = action.stage
        if action.kind == "B":
            return at(self.input_gradient, stage) + at(self.weight_gradient, stage)
        return at({"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient}[action.kind], stage)


def _require(name: str, value: object, legal: bool, range_: str) -> None:
    if not legal:
        raise ScheduleError(f"Costs({name}={value!r}): a schedule cannot be priced with that; it is {range_}")


def at(values: PerStage, stage: int) -> float:
    return values if isinstance(values, (int, float)) else values[stage]


class Event(NamedTuple):
    """Start and end of an action on a rank."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Timeline of a schedule, as returned by `simulate`.

    Args:
        schedule: the schedule.
        events: for each rank, the events of its actions in order.
        peaks: for each rank, the largest sum of live activations.
    """

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    peaks: tuple[float, ...]

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last."""
        ends = [event.end for row in self.events for event in row]
        return max(ends) - min(event.start for row in self.events for event in row)

    @property
    def busy(self) -> tuple[float, ...]:
        """Busy time of each rank. Overlapping actions count once."""
        return tuple(_covered(row) for row in self.events)

    @property
    def bubble(self) -> float:
        """Largest idle time over the ranks."""
        return self.makespan - min(self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks as a fraction of their total time."""
        whole = self.makespan * self.schedule.ranks
        return 1 - sum(self.busy) / whole if whole else 0.0  # if no action takes time, no rank waits

    @property
    def span_bubble(self) -> float:
        """Largest idle time over the ranks, counted between the first and the last action of a rank."""
        spans = [row[-1].end - row[0].start if row else 0.0 for row in self.events]
        return max(span - busy for span, busy in zip(spans, self.busy, strict=True))


def _covered(row: Sequence[Event]) -> float:
    covered, until = 0.0, float("-inf")
    for _, _, start, end in row:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a schedule and return its timeline.

    >>> from functional_parallel import schedules
    >>> timeline = schedules.simulate(schedules.one_f_one_b(4, 8))
    >>> timeline.makespan, timeline.bubble, round(timeline.bubble_fraction, 4), timeline.peaks
    (33.0, 9.0, 0.2727, (4.0, 3.0, 2.0, 1.0))

    Args:
        schedule: a schedule that passes `check`.
        costs: costs of actions and transfers. By default F, I and W take time 1 and transfers take no time.

    Returns:
        The timeline.

    Raises:
        ScheduleError: if the ranks wait for each other, or a cost has values for another number of stages.
    """
    costs = costs or Costs()
    _check_costs(schedule, costs)
    draw = random.Random(costs.seed)
    times = {action: costs.time(action) * (1 + costs.jitter * draw.uniform(-1, 1)) for action in schedule}
    arrivals: dict[tuple[Action, int], float] = {}  # of results, by rank
    busy_until: dict[tuple[int, int], float] = {}  # by sender and receiver
    events: list[list[Event]] = [[] for _ in schedule.actions]
    free = [0.0] * schedule.ranks
    for rank, group, needed in replay_groups(schedule, () if costs.overlap is None else schedule.pairs):
        start = max([free[rank], *(arrivals[earlier, rank] for earlier in needed)])
        free[rank] = start + _duration([times[action] for action in group], costs)
        for action in group:
            events[rank].append(Event(rank, action, start, free[rank]))
            arrivals[action, rank] = free[rank]
            stage = receiving_stage(schedule, action)
            if stage is not None and (to := schedule.rank_of_stage[stage]) != rank:
                # Messages of two stages have the same size in both directions: a gradient is as large as its value.
                size = at(costs.message, min(action.stage, stage))
                sent = max(free[rank], busy_until.get((rank, to), 0.0)) + size / costs.bandwidth
                busy_until[rank, to] = sent
                arrivals[action, to] = sent + costs.latency
    if sum(map(len, events)) < sum(map(len, schedule.actions)):
        raise ScheduleError(f"{schedule.name}: its ranks wait for each other; `check` names the actions")
    return Timeline(schedule, tuple(map(tuple, events)), tuple(peak_of(row, costs) for row in schedule.actions))


def _check_costs(schedule: Schedule, costs: Costs) -> None:
    for name in ("forward", "input_gradient", "weight_gradient", "message", "activation"):
        values = getattr(costs, name)
        if not isinstance(values, (int, float)) and len(values) != schedule.stages:
            raise ScheduleError(
                f"`{name}` has {len(values)} values, but {schedule.name} has {schedule.stages} stages; give one value "
                "per stage, or one number for all"
            )


def _duration(times: Sequence[float], costs: Costs) -> float:
    saved = (costs.overlap or 0.0) * min(times) if len(times) > 1 else 0.0
    return sum(times) - saved


def peak_of(row: Sequence[Action], costs: Costs) -> float:
    live = peak = 0.0
    kept = costs.kept_by_weight_gradient
    for action in row:
        live += {"F": 1.0, "B": -1.0, "I": kept - 1, "W": -kept}[action.kind] * at(costs.activation, action.stage)
        peak = max(peak, live)
    return peak
