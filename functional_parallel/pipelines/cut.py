"""Cut of a model into stages: at marks in its code, between given layers, or balanced by work or memory.

Ops after the k-th cut point, in the order of the model's ops, belong to stage k or a later stage.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import torch
from torch import fx

from sharding_specs import Mesh
from sharding_specs.rules import matches_within

from ..errors import PipelineError
from ..ir import Aval, Traced, info, operands_of, source_of
from ..program import recompute_cost
from ..schedules import count
from .roles import OpRole, OpRoles

BALANCES = ("work", "memory", "layers")
_FREE = 1e-6  # share of the model's cost that is spread over its ops if stages would cost nothing
_SLACK = 1.1  # largest stage allowed for the sake of smaller messages, relative to the minimum


@dataclass(frozen=True)
class CutSpec:
    balance: str = "work"  # the quantity to balance over the stages; "memory" of parameters and residuals; or "layers"
    lengths: Mapping[str, int] = field(default_factory=dict)  # path of each layer → number of layers in its stack
    stages: Mapping[str, int] = field(default_factory=dict)  # pattern of paths → stage of these parameters

    def stage_of(self, path: str | None) -> int | None:
        """Return the stage that a pattern gives to a parameter, if one does."""
        found = (stage for pattern, stage in self.stages.items() if matches_within(pattern, path or ""))
        return next(found, None)


def cut_of(traced: Traced, roles: OpRoles, cut: CutSpec, stages: int, mesh: Mesh) -> dict[fx.Node, int]:
    forward = _staged_forward(traced, roles)
    marks = 1 + max((source.stage for node in roles.of if (source := source_of(node)) is not None), default=0)
    if marks > 1:
        return _by_marks(forward, roles, marks, stages)
    if cut.lengths:
        return _by_layers(traced, roles, forward, cut.lengths, stages)
    if cut.stages:
        return _by_paths(forward, roles, cut, stages)
    if stages == 1:
        return dict.fromkeys(forward, 0)
    if not forward:
        raise PipelineError(
            "all of the model is computed in its backward, where fp.pipeline does not look for cuts; compile "
            "fp.grad_and_value without fp.remat('nothing'), or mark the stages with fp.stage_boundary"
        )
    if cut.balance == "layers" and (found := _by_numbers(forward, roles, stages)):
        return found
    return _balanced(forward, _costs(forward, roles, cut.balance, mesh), stages)


def _staged_forward(traced: Traced, roles: OpRoles) -> list[fx.Node]:
    return [node for node in traced.nodes if roles.of[node] is OpRole.STAGED and node not in roles.backward]


def _by_marks(forward: list[fx.Node], roles: OpRoles, marks: int, stages: int) -> dict[fx.Node, int]:
    if marks != stages:
        raise PipelineError(
            f"the model's {marks - 1} fp.stage_boundary() make {marks} stages, but the schedule has {stages}: mark "
            f"{stages - 1}, or take them all out and let fp.pipeline cut"
        )
    found, last = {}, 0
    for node in forward:
        source = source_of(node)
        last = last if source is None else source.stage
        found[node] = last
    backward = {source.stage for node in roles.backward if (source := source_of(node)) is not None}
    empty = sorted(set(range(stages)) - set(found.values()) - backward)  # a linear last stage has only a backward
    if empty:
        raise PipelineError(
            f"stage {empty[0]} of {stages} uses no parameter and makes no value that a later stage needs, or "
            "depends on the batch alone: take out an fp.stage_boundary() next to it, or move it"
        )
    return found


def _by_layers(
    traced: Traced, roles: OpRoles, forward: list[fx.Node], lengths: Mapping[str, int], stages: int
) -> dict[fx.Node, int]:
    _check_stacks(traced, roles)
    uneven = {path.rpartition("/")[0]: length for path, length in lengths.items() if length % stages}
    if uneven:
        listed = ", ".join(f"{path} ({length} layers)" for path, length in uneven.items())
        raise PipelineError(
            f"{stages} stages do not divide the stacked layers of {listed}: take a number of layers that is a multiple "
            "of the stages, or leave the specs out, and fp.pipeline cuts where the work is in balance"
        )
    found, last = {}, 0
    for node in forward:
        for parameter in roles.parameters_of(operands_of(node)):
            path = info(parameter).param_path
            if path in lengths:
                last = max(last, stage_of_layer(path, lengths, stages))
        found[node] = last
    return found


def _by_numbers(forward: list[fx.Node], roles: OpRoles, stages: int) -> dict[fx.Node, int]:
    """Cut between layers, by the first number in the paths of their parameters; empty if there are too few layers."""
    layers: dict[str, int] = {}  # in the order of their use
    used = {node: [_layer(each) for each in roles.parameters_of(operands_of(node))] for node in forward}
    for layer in itertools.chain.from_iterable(used.values()):
        if layer:
            layers.setdefault(layer, len(layers))
    found, last = {}, 0
    for node in forward if len(layers) >= stages else ():
        last = max([last, *(layers[layer] * stages // len(layers) for layer in used[node] if layer)])
        found[node] = last
    return found


def _by_paths(forward: list[fx.Node], roles: OpRoles, cut: CutSpec, stages: int) -> dict[fx.Node, int]:
    """Cut so that the fewest bytes of parameters are first used on another stage than theirs.

    Among these cuts, each cut point is the narrowest one. Models use few parameters in another order than they name
    them, for example a norm.
    """
    first = dict[fx.Node, int]()
    for index, node in enumerate(forward):
        for parameter in roles.parameters_of(operands_of(node)):
            first.setdefault(parameter, index)
    wanted = {each: stage for each in first if (stage := cut.stage_of(info(each).param_path)) is not None}
    if {*wanted.values()} != {*range(stages)}:
        raise PipelineError(
            f"the schedule has {count(stages, 'stage')}, and pipeline(stages=…) places parameters on the stages "
            f"{sorted({*wanted.values()})}: every stage from 0 to {stages - 1} must have some, and no other may"
        )
    places, bounds = _places(forward), list[int]()
    for stage in range(1, stages):
        change = [0] * len(forward)
        for parameter, own in wanted.items():
            change[first[parameter]] += info(parameter).nbytes if own >= stage else -info(parameter).nbytes
        moved = [0, *itertools.accumulate(change)]  # by cut point, up to a constant
        best = [index for index, size in enumerate(moved) if size == min(moved)]
        bounds.append(min(best, key=lambda index: (places.get(index, inf), -index)))
    return {node: bisect_right(bounds, index) for index, node in enumerate(forward)}


def _layer(parameter: fx.Node) -> str:
    found = re.match(r"(.*?[./]|)\d+(?=[./]|$)", str(info(parameter).param_path))
    return found[0] if found else ""


def stage_of_layer(path: str, lengths: Mapping[str, int], stages: int) -> int:
    return int(path.rpartition("/")[2]) * stages // lengths[path]


def _check_stacks(traced: Traced, roles: OpRoles) -> None:
    for node in traced.nodes:
        is_whole = node.target is torch.ops.aten.stack.default and roles.of[node] is OpRole.ONCE
        if is_whole and any(info(operand).is_parameter for operand in operands_of(node)):
            user = next(iter(node.users))
            raise PipelineError(
                f"{source_of(user)}: {user.target} uses a stack of layers as a whole, but its layers live on different "
                "stages: take one layer at a time, params[…][i] or a loop over it"
            )


def _costs(forward: Sequence[fx.Node], roles: OpRoles, balance: str, mesh: Mesh) -> list[float]:
    if balance == "work":
        return [recompute_cost(node, mesh) for node in forward]
    seen: set[fx.Node] = set()
    found = []
    for node in forward:
        parameters = [o for o in roles.parameters_of(operands_of(node)) if o not in seen]
        seen.update(parameters)
        is_kept = isinstance(info(node).val, Aval) and any(user in roles.backward for user in node.users)
        kept = info(node).aval.nbytes if is_kept else 0
        found.append(float(kept + sum(info(o).aval.nbytes for o in parameters)))
    return found


def finest(traced: Traced, roles: OpRoles, mesh: Mesh) -> tuple[dict[fx.Node, int], int]:
    """Return the cut at every cut point that is not wider than its neighbours, with its number of stages."""
    forward = _staged_forward(traced, roles)
    places, costs = _narrow(_places(forward)), _costs(forward, roles, "work", mesh)
    last = max((index for index, cost in enumerate(costs) if cost > 0), default=-1)
    found, stage, so_far = {}, 0, 0.0
    for index, node in enumerate(forward):
        if index in places and so_far > 0 and index <= last:  # each stage has some work
            stage, so_far = stage + 1, 0.0
        found[node] = stage
        so_far += costs[index]
    return found, stage + 1


def _narrow(places: dict[int, int]) -> set[int]:
    order = sorted(places)
    widths = [inf, *(places[index] for index in order), inf]
    return {
        index for number, index in enumerate(order, 1) if widths[number] <= min(widths[number - 1], widths[number + 1])
    }


def _balanced(forward: list[fx.Node], costs: list[float], stages: int) -> dict[fx.Node, int]:
    places = _places(forward)
    if stages > len(places) + 1:
        raise PipelineError(
            f"the model's forward can be cut into at most {count(len(places) + 1, 'stage')}, and the schedule has "
            f"{stages}; take fewer ranks or chunks"
        )
    bounds = bounds_of(places, costs, stages)
    return {node: bisect_right(bounds, index) for index, node in enumerate(forward)}


def bounds_of(places: dict[int, int], costs: list[float], stages: int) -> list[int]:
    """Return the cut points of the best cut, in order. `places` maps possible cut points to the bytes that would cross.

    Every stage costs something if such a cut exists. Otherwise each op gets a small additional cost, so that stages
    that cost nothing are spread over the ops.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    cuts = _least(places, sums, stages)
    if cuts is None:
        small = (sums[-1] or 1.0) * _FREE / len(costs)
        sums = [0.0, *itertools.accumulate(cost + small for cost in costs)]
        cuts = _least(places, sums, stages)
        assert cuts is not None, "there is a place for every stage"
    return _evened(cuts, places, sums)


def _evened(cuts: list[int], places: dict[int, int], sums: list[float]) -> list[int]:
    """Balance the other stages if one stage is large in every cut.

    Each cut point moves to the one, at most as wide, that best balances the stages on both sides, until none moves.
    Every move reduces the sum of the stages' squared costs, so the loop ends.
    """
    bounds, order, moved = [0, *cuts, len(sums) - 1], sorted(places), True
    while moved:
        moved = False
        for number in range(1, len(bounds) - 1):
            left, here, right = bounds[number - 1 : number + 2]
            between = order[bisect_right(order, left) : bisect_left(order, right)]
            options = [place for place in between if places[place] <= places[here]]
            larger = {at: max(sums[at] - sums[left], sums[right] - sums[at]) for at in options}
            best = min(options, key=larger.__getitem__)
            if larger[best] < larger[here]:
                bounds[number], moved = best, True
    return bounds[1:-1]


def _places(forward: list[fx.Node]) -> dict[int, int]:
    position = {node: index for index, node in enumerate(forward)}
    change = [0] * (len(forward) + 1)
    for node, index in position.items():
        last = max((position[user] for user in node.users if user in position), default=index)
        size = info(node).aval.nbytes if isinstance(info(node).val, Aval) else 1 << 60
        change[index + 1] += size
        change[last + 1] -= size if last + 1 <= len(forward) else 0
    crossing, bytes_now = [], 0
    for delta in change:
        bytes_now += delta
        crossing.append(bytes_now)
    regions = [source.region if (source := source_of(node)) is not None else None for node in forward]
    return {
        index: crossing[index]
        for index in range(1, len(forward))
        if crossing[index] <= min(crossing[index - 1] or 1 << 62, crossing[index + 1])
        and (regions[index] is None or regions[index] != regions[index - 1])
    }


def _least(places: dict[int, int], sums: list[float], stages: int) -> list[int] | None:
    ends = [0, *sorted(places), len(sums) - 1]
    costs = [sums[end] for end in ends]
    largest = _least_largest(costs, stages)
    if largest == inf:  # in every cut some stage costs nothing
        return None
    crossing = [0, *(places[end] for end in ends[1:-1]), 0]
    return [ends[index] for index in _least_crossing(costs, crossing, stages, largest * _SLACK)]


def _least_largest(costs: list[float], stages: int) -> float:
    """Return the minimal cost of the largest stage if every stage costs something; inf if no such cut exists."""
    if len(set(costs)) <= stages:
        return inf

    def ends(limit: float) -> list[float]:
        found = [0.0]
        for _ in range(stages):
            found.append(costs[bisect_right(costs, found[-1] + limit) - 1])
        return found

    low, high = 0.0, costs[-1]
    for _ in range(64):  # halvings, to the precision of a float
        middle = (low + high) / 2
        low, high = (low, middle) if ends(middle)[-1] == costs[-1] else (middle, high)
    return max(end - start for start, end in itertools.pairwise(ends(high)))


def _least_crossing(costs: list[float], crossing: list[int], stages: int, limit: float) -> list[int]:
    """Return the cut with the fewest crossing bytes in total, if every stage costs more than 0 and at most `limit`.

    The possible starts of a stage are a window that moves forward with the stage's end. The deque holds the starts in
    the window that no later start beats, with the best first.
    """
    best: list[float] = [0.0, *[inf] * (len(costs) - 1)]
    starts: list[list[int]] = []
    for _ in range(stages):
        following, chosen = [inf] * len(costs), [0] * len(costs)
        window: deque[int] = deque()
        entering = 0
        for end in range(1, len(costs)):
            while costs[entering] < costs[end]:
                while window and best[window[-1]] > best[entering]:
                    window.pop()
                window.append(entering)
                entering += 1
            while window and costs[end] - costs[window[0]] > limit:
                window.popleft()
            if window and best[window[0]] < inf:
                following[end], chosen[end] = best[window[0]] + crossing[end], window[0]
        best = following
        starts.append(chosen)
    cuts = [len(costs) - 1]
    for chosen in reversed(starts):
        cuts.append(chosen[cuts[-1]])
    return cuts[-2:0:-1]
