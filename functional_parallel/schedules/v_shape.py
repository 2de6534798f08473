"""V-shaped schedules, which use less memory than 1F1B: a folded pipeline with a pattern that frees activations sooner.

Rank r of P holds stages r and 2P − 1 − r, so a microbatch visits it four times, at units of time of the pattern. The
next microbatch follows six units later. Weight gradients use the two units that remain, and the free ones at the ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Schedule
from .domain import ranks_of
from .zero_bubble import folded_placement

# Visits of a microbatch to a rank: 0 is the near stage, 1 the far stage. W0 and W1 are the weight gradients. W is a
# weight gradient that is not yet assigned to a stage.
_VISITS = ("F0", "F1", "I1", "I0")
_KINDS = (*_VISITS, "W", "W1", "W0")

_Plan = dict[str, list[int]]  # for each kind of action of a rank, the start of each microbatch, in units of time


def v_half(stages: int, microbatches: int) -> Schedule:
    """Build a V-Half schedule: half the activations of the first rank of 1F1B, and half its bubble.

    >>> from functional_parallel import schedules
    >>> schedules.peaks(schedules.v_half(8, 8)), schedules.simulate(schedules.v_half(8, 8)).bubble
    ((6, 6, 6, 6), 5.0)

    Source: Qi et al. 2024, Pipeline parallelism with controllable memory (V-Half).

    Args:
        stages: number of stages, two per rank.
        microbatches: number of microbatches per step.

    Returns:
        The schedule. A rank holds at most 2(⌊P/2⌋ + 1) activations of one microbatch and stage.
    """
    ranks = ranks_of("v-half", stages, microbatches, 2)
    gap = 0 if ranks % 2 else 3
    first = [(2 * r, 3 * ranks - r - 2, 3 * ranks + gap + 2 * r - 1, 6 * ranks + gap - r - 2) for r in range(ranks)]
    return _from_pattern("v-half", first, microbatches)


def v_min(stages: int, microbatches: int) -> Schedule:
    """Build a V-Min schedule: the minimal activations of a folded pattern, about a third of the first rank of 1F1B.

    >>> from functional_parallel import schedules
    >>> schedules.peaks(schedules.v_min(8, 8)), schedules.simulate(schedules.v_min(8, 8)).bubble
    ((4, 4, 4, 4), 11.0)

    Source: Qi et al. 2024, Pipeline parallelism with controllable memory (V-Min).

    Args:
        stages: number of stages, two per rank.
        microbatches: number of microbatches per step.

    Returns:
        The schedule. A rank holds at most 2⌈(P + 2)/3⌉ activations of one microbatch and stage.
    """
    ranks = ranks_of("v-min", stages, microbatches, 2)
    gap = 0 if ranks % 3 else 2
    first = [(r, 2 * ranks - r - 1, 2 * ranks + gap + r, 4 * ranks + gap - r - 1) for r in range(ranks)]
    return _from_pattern("v-min", first, microbatches)


def _from_pattern(name: str, first: list[tuple[int, int, int, int]], microbatches: int) -> Schedule:
    ranks = len(first)
    plans = [
        {kind: [start + 6 * m for m in range(microbatches)] for kind, start in zip(_VISITS, starts, strict=True)}
        for starts in first
    ]
    plans = _moved_up([plan | {"W": _holes(plan, _VISITS[2:])} for plan in plans], warm_up=True)
    # The weight gradients were scheduled before the end of the step moved; schedule them again.
    plans = _moved_up([_visits(plan) for plan in plans], warm_up=False)
    rows = [tuple(_actions(r, ranks, _visits(plan))) for r, plan in enumerate(plans)]
    return Schedule(tuple(rows), folded_placement(ranks), microbatches, name=name)


def _visits(plan: _Plan) -> _Plan:
    return {kind: plan[kind] for kind in _VISITS}


def _actions(r: int, ranks: int, plan: _Plan) -> Iterator[Action]:
    far = _holes(plan, ("I1",))
    near = _holes(plan | {"W1": far}, ("I0",))
    for _, kind, m in sorted((t, k, m) for k, ts in (plan | {"W1": far, "W0": near}).items() for m, t in enumerate(ts)):
        yield Action(kind[0], 2 * ranks - 1 - r if kind[1] == "1" else r, m)


def _holes(plan: _Plan, kinds: tuple[str, ...]) -> list[int]:
    """Return the earliest free units for the weight gradients that follow input gradients of these kinds."""
    taken = {time for times in plan.values() for time in times}
    found: list[int] = []
    for after in sorted(time for kind in kinds for time in plan[kind]):
        time = max(after, found[-1] if found else -1) + 1
        while time in taken:
            time += 1
        found.append(time)
    return found


def _items(plans: list[_Plan]) -> list[tuple[int, int, int, int]]:
    return sorted(
        (time, r, _KINDS.index(kind), m)
        for r, plan in enumerate(plans)
        for kind, times in plan.items()
        for m, time in enumerate(times)
    )


def _needs(r: int, kind: str, m: int, ranks: int) -> Iterator[tuple[int, str, int]]:
    before = r - 1 if kind in ("F0", "I1") else r + 1
    if 0 <= before < ranks:
        yield before, kind, m
    if kind != "F0":
        yield r, _VISITS[_VISITS.index(kind) - 1], m
    if m:
        yield r, kind, m - 1


def _moved_up(plans: list[_Plan], warm_up: bool) -> list[_Plan]:
    """Move actions to earlier free units without more memory than before. The steady phase does not change."""
    limit = max(map(_peak, plans))
    taken: list[set[int]] = [set() for _ in plans]
    phase = 0  # 0 warm-up, 1 steady phase, 2 drain
    for _, r, index, m in _items(plans):
        kind, plan = _KINDS[index], plans[r]
        if phase == 0 and (r, kind) == (0, "I0"):
            phase = 1
        if phase == 2 or (phase == 0 and warm_up):
            _move_up(plans, r, kind, m, taken[r], limit)
        elif phase == 1 and (kind, m) == ("F0", len(plan[kind]) - 1):
            phase = 2
        taken[r].add(plan[kind][m])
    return _settled(plans if warm_up else [plan | {"W": _holes(plan, _VISITS[2:])} for plan in plans])


def _move_up(plans: list[_Plan], r: int, kind: str, m: int, taken: set[int], limit: int) -> None:
    plan, time = plans[r], plans[r][kind][m]
    if kind == "W":
        after = [sorted(plan["I1"] + plan["I0"])[m], *plan["W"][max(0, m - 1) : m]]
    else:
        after = [plans[other][what][which] for other, what, which in _needs(r, kind, m, len(plans))]
    for candidate in range(1 + max(after, default=-1), time):
        plan[kind][m] = candidate
        if candidate not in taken and _peak(plan) <= limit:
            return
    plan[kind][m] = time


_LIVE = {"F": 1, "W": -1}  # number of activations that an action adds


def _peak(plan: _Plan) -> int:
    """Return the peak number of live activations. Unscheduled weight gradients use the next free units."""
    live = peak = waiting = last = 0
    own = "W" in plan
    for time, change, gradient in sorted(
        (time, _LIVE.get(kind[0], 0), kind[0] == "I") for kind, times in plan.items() for time in times
    ):
        if waiting and not own:
            done = min(waiting, time - last)
            live, waiting = live - done, waiting - done
        live, waiting, last = live + change, waiting + gradient, time + 1
        if live > peak:
            peak = live
    return peak


def _settled(plans: list[_Plan]) -> list[_Plan]:
    """Start each action as soon as the rank is free and its inputs are available. The order of actions is unchanged."""
    free = [0] * len(plans)
    found: list[_Plan] = [{kind: [] for kind in plan} for plan in plans]
    for _, r, index, m in _items(plans):
        kind = _KINDS[index]
        needs = () if kind == "W" else _needs(r, kind, m, len(plans))
        start = max([free[r], *(found[other][what][which] + 1 for other, what, which in needs)])
        found[r][kind].append(start)
        free[r] = start + 1
    return found
