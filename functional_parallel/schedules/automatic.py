"""Zero-bubble schedules by search: the best of many greedy schedules for given costs and a memory limit."""

from __future__ import annotations

import heapq
from itertools import product, starmap
from typing import NamedTuple

from .actions import Action, Schedule
from .check import peaks
from .domain import ranks_of, require
from .simulate import Costs, at, simulate
from .zero_bubble import zb_h1, zb_h2


def zb_auto(stages: int, microbatches: int, limit: int | None = None, costs: Costs | None = None) -> Schedule:
    """Search the best schedule with split backwards under the costs, with at most `limit` live microbatches per rank.

    >>> from functional_parallel import schedules
    >>> for limit in (4, 5, 7):
    ...     found = schedules.simulate(schedules.zb_auto(4, 8, limit=limit))
    ...     print(limit, found.makespan, found.span_bubble, max(found.peaks))
    4 27.0 3.0 4.0
    5 27.0 2.0 5.0
    7 27.0 0.0 7.0

    Source: the objective is from Qi et al. 2024, Zero bubble pipeline parallelism, section 3. The search algorithm is
    different.

    Args:
        stages: number of stages, one per rank.
        microbatches: number of microbatches per step.
        limit: maximum number of microbatches with live activations on a rank, from F to W. The default is
            the number of stages.
        costs: costs of actions and transfers. By default F, I and W take time 1 and transfers take no time.

    Returns:
        The schedule with the smallest span bubble, which is the idle time per step if steps follow each other
        immediately. Ties are broken by the makespan.
    """
    ranks = ranks_of("zb-auto", stages, microbatches)
    allowed = ranks if limit is None else limit
    require("zb-auto", "room for at least 1 microbatch", "limit", allowed, lambda _: True)
    priced = costs or Costs()
    policies = starmap(_Policy, product((0, 1, 2), (False, True), (False, True)))
    candidates = [_greedy(ranks, microbatches, allowed, priced, policy) for policy in policies]
    candidates += [made(stages, microbatches) for made in (zb_h1, zb_h2)]
    fitting = [found for found in candidates if max(peaks(found)) <= allowed]

    def rank(found: Schedule) -> tuple[float, float]:
        timeline = simulate(found, priced)
        return timeline.span_bubble, timeline.makespan

    best = min(fitting, key=rank)
    return Schedule(best.actions, best.rank_of_stage, microbatches, name="zb-auto")


class _Policy(NamedTuple):
    ahead: int  # forwards in flight on rank r of P: 0 any number, 1 P − r, 2 2(P − r) − 1, within the limit
    forward_first: bool
    waits: bool  # instead of starting a weight gradient that would delay an action that is about to be ready


def _greedy(ranks: int, microbatches: int, limit: int, costs: Costs, policy: _Policy) -> Schedule:
    run = [_Rank(r, ranks, microbatches, limit, costs, policy) for r in range(ranks)]
    run[0].arrivals["F"] = [0.0] * microbatches
    turns = [(0.0, r) for r in range(ranks)]
    while turns:
        now, r = heapq.heappop(turns)
        if now < run[r].free:
            continue
        action = run[r].choose(now)
        if action is None:
            wake = run[r].next_arrival(now)
            if wake is not None:
                heapq.heappush(turns, (wake, r))
            continue
        end = run[r].start(action, now)
        heapq.heappush(turns, (end, r))
        to = _receiver(action, ranks)
        if to is not None:
            there = end + (0.0 if to == r else costs.latency + at(costs.message, min(r, to)) / costs.bandwidth)
            kind = "I" if action.kind == "F" and r == ranks - 1 else action.kind
            run[to].arrivals[kind].append(there)
            heapq.heappush(turns, (max(there, run[to].free), to))
    return Schedule(tuple(tuple(rank.actions) for rank in run), tuple(range(ranks)), microbatches, name="zb-auto")


def _receiver(action: Action, ranks: int) -> int | None:
    if action.kind == "F":
        return min(action.stage + 1, ranks - 1)  # the forward of the last stage makes its own input gradient ready
    return action.stage - 1 if action.kind == "I" and action.stage else None


class _Rank:
    def __init__(self, r: int, ranks: int, microbatches: int, limit: int, costs: Costs, policy: _Policy) -> None:
        self.r, self.microbatches, self.limit, self.costs, self.policy = r, microbatches, limit, costs, policy
        self.ahead = (limit, ranks - r, 2 * (ranks - r) - 1)[policy.ahead]
        self.arrivals: dict[str, list[float]] = {"F": [], "I": []}
        self.done = dict.fromkeys("FIW", 0)
        self.actions: list[Action] = []
        self.free = 0.0

    def arrives(self, kind: str) -> float:
        return self.arrivals[kind][self.done[kind]] if self.done[kind] < len(self.arrivals[kind]) else float("inf")

    def allowed(self, kind: str) -> bool:
        if kind == "W":
            return self.done["W"] < self.done["I"]
        if kind == "I":
            return True
        return self.done["F"] - self.done["W"] < self.limit and self.done["F"] - self.done["I"] < self.ahead

    def choose(self, now: float) -> Action | None:
        order = "FI" if self.policy.forward_first and self.done["I"] else "IF"
        for kind in order:
            if self.allowed(kind) and self.arrives(kind) <= now:
                return Action(kind, self.r, self.done[kind])
        if not self.allowed("W"):
            return None
        soon = now + at(self.costs.weight_gradient, self.r) / 2
        if self.policy.waits and any(self.allowed(kind) and self.arrives(kind) < soon for kind in order):
            return None
        return Action("W", self.r, self.done["W"])

    def next_arrival(self, now: float) -> float | None:
        later = [self.arrives(kind) for kind in "FI" if self.allowed(kind) and now < self.arrives(kind) < float("inf")]
        return min(later, default=None)

    def start(self, action: Action, now: float) -> float:
        self.actions.append(action)
        self.done[action.kind] += 1
        self.free = now + self.costs.time(action)
        return self.free
