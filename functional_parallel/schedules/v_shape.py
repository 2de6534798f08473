"""Zero bubble for less memory than 1F1B: the folded pipeline with a pattern that frees activations sooner.

Rank r of P holds stages r and 2P − 1 − r, so a microbatch visits it four times: forward through its near and its far
stage, then back through the far and the near. A pattern says at which unit of time those four begin, and every six
units the next microbatch follows; weight gradients take the two units in between. How far apart the visits are is how
long activations live: that is the memory. At the ends of a step, where the pattern has holes, actions move up as far
as what they use and that memory permit.
"""

from __future__ import annotations

from collections.abc import Iterator

from .actions import Action, Schedule
from .domain import ranks_of
from .zero_bubble import folded_placement

__all__ = ["v_half", "v_min"]

# A microbatch's way through a rank: 0 is the near stage, 1 the far one. W0 and W1 are the weight gradients, and W is
# one of them while it is open which.
_VISITS = ("F0", "F1", "I1", "I0")
_KINDS = (*_VISITS, "W", "W1", "W0")

_Plan = dict[str, list[int]]  # for each kind of action of a rank, the unit of time for each microbatch


def v_half(stages: int, microbatches: int) -> Schedule:
    """Half the activations of 1F1B's first rank, for half of its bubble.

    >>> from functional_parallel import schedules
    >>> schedules.peaks(schedules.v_half(8, 8)), schedules.simulate(schedules.v_half(8, 8)).bubble
    ((6, 6, 6, 6), 5.0)

    Source: Qi et al. 2024, Pipeline parallelism with controllable memory (V-Half).

    Args:
        stages: how many stages, two per rank.
        microbatches: how many microbatches a step has.

    Returns:
        The schedule; a rank holds the activations of 2(⌊P/2⌋ + 1) stages' microbatches at most.
    """
    ranks = ranks_of("v-half", stages, microbatches, 2)
    gap = 0 if ranks % 2 else 3
    first = [(2 * r, 3 * ranks - r - 2, 3 * ranks + gap + 2 * r - 1, 6 * ranks + gap - r - 2) for r in range(ranks)]
    return _from_pattern("v-half", first, microbatches)


def v_min(stages: int, microbatches: int) -> Schedule:
    """The least activations that a folded pattern can hold: towards a third of 1F1B's first rank.

    >>> from functional_parallel import schedules
    >>> schedules.peaks(schedules.v_min(8, 8)), schedules.simulate(schedules.v_min(8, 8)).bubble
    ((4, 4, 4, 4), 11.0)

    Source: Qi et al. 2024, Pipeline parallelism with controllable memory (V-Min).

    Args:
        stages: how many stages, two per rank.
        microbatches: how many microbatches a step has.

    Returns:
        The schedule; a rank holds the activations of 2⌈(P + 2)/3⌉ stages' microbatches at most.
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
    # The weight gradients found their places under the old ends of the step; they are placed anew.
    plans = _moved_up([_visits(plan) for plan in plans], warm_up=False)
    rows = [tuple(_actions(r, ranks, _visits(plan))) for r, plan in enumerate(plans)]
    return Schedule(tuple(rows), folded_placement(ranks), microbatches, name=name)


def _visits(plan: _Plan) -> _Plan:
    return {kind: plan[kind] for kind in _VISITS}


def _actions(r: int, ranks: int, plan: _Plan) -> Iterator[Action]:
    """A rank's actions in order, a free unit going to the far stage's weight gradient first."""
    far = _holes(plan, ("I1",))
    near = _holes(plan | {"W1": far}, ("I0",))
    for _, kind, m in sorted((t, k, m) for k, ts in (plan | {"W1": far, "W0": near}).items() for m, t in enumerate(ts)):
        yield Action(kind[0], 2 * ranks - 1 - r if kind[1] == "1" else r, m)


def _holes(plan: _Plan, kinds: tuple[str, ...]) -> list[int]:
    """The free units that the weight gradients take after input gradients of these kinds, each as soon as it can."""
    taken = {time for times in plan.values() for time in times}
    found: list[int] = []
    for after in sorted(time for kind in kinds for time in plan[kind]):
        time = max(after, found[-1] if found else -1) + 1
        while time in taken:
            time += 1
        found.append(time)
    return found


def _items(plans: list[_Plan]) -> list[tuple[int, int, int, int]]:
    """Every action as (time, rank, index of its kind, microbatch), in the order of time."""
    return sorted(
        (time, r, _KINDS.index(kind), m)
        for r, plan in enumerate(plans)
        for kind, times in plan.items()
        for m, time in enumerate(times)
    )


def _needs(r: int, kind: str, m: int, ranks: int) -> Iterator[tuple[int, str, int]]:
    """Rank, kind and microbatch of what a visit comes after."""
    before = r - 1 if kind in ("F0", "I1") else r + 1
    if 0 <= before < ranks:
        yield before, kind, m
    if kind != "F0":
        yield r, _VISITS[_VISITS.index(kind) - 1], m
    if m:
        yield r, kind, m - 1


def _moved_up(plans: list[_Plan], warm_up: bool) -> list[_Plan]:
    """Move actions to earlier free units, holding no more than the plan did; the steady part in between stays.

    That lasts from rank 0's first backward of its near stage to the last microbatch's first forward.
    """
    limit = max(map(_peak, plans))
    taken: list[set[int]] = [set() for _ in plans]
    phase = 0  # 0 the warm-up, 1 the steady part, 2 what comes after
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


_LIVE = {"F": 1, "W": -1}  # the activations that an action adds


def _peak(plan: _Plan) -> int:
    """The most activations alive; where weight gradients have no place yet, each takes the next free unit."""
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
    """The same orders, each action as soon as the rank is free and what it needs is there."""
    free = [0] * len(plans)
    found: list[_Plan] = [{kind: [] for kind in plan} for plan in plans]
    for _, r, index, m in _items(plans):
        kind = _KINDS[index]
        needs = () if kind == "W" else _needs(r, kind, m, len(plans))
        start = max([free[r], *(found[other][what][which] + 1 for other, what, which in needs)])
        found[r][kind].append(start)
        free[r] = start + 1
    return found
