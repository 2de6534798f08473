"""Dependencies of an action: earlier actions of its stage on the microbatch, and the result of the adjacent stage."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from .actions import Action, Schedule


def waits_for(schedule: Schedule, kinds: Mapping[tuple[int, int], str], action: Action) -> list[Action]:
    kind, stage, microbatch = action
    if kind == "F":
        before = schedule.before(stage)
        return [] if before is None else [Action("F", before, microbatch)]
    if kind == "W":
        return [Action("I", stage, microbatch)]
    after = schedule.after(stage)
    own = Action("F", stage, microbatch)
    return [own] if after is None else [Action(kinds.get((after, microbatch), "B"), after, microbatch), own]


def receiving_stage(schedule: Schedule, action: Action) -> int | None:
    if action.kind == "W":
        return None
    return schedule.after(action.stage) if action.kind == "F" else schedule.before(action.stage)


def gradients_of_input(schedule: Schedule) -> dict[tuple[int, int], str]:
    """Return, per stage and microbatch, the kind of the action that computes the gradient of the input: B or I."""
    return {(stage, microbatch): kind for kind, stage, microbatch in schedule if kind in "BI"}


def replay(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield rank and action in a sequential order of execution, one action per turn of a rank. End if all wait."""
    return ((rank, action) for rank, (action,), _ in replay_groups(schedule, pairs=()))


def replay_groups(
    schedule: Schedule, pairs: Collection[Action]
) -> Iterator[tuple[int, tuple[Action, ...], list[Action]]]:
    """Like `replay`, but an action in `pairs` runs with its successor. Also yield the dependencies of each group."""
    kinds = gradients_of_input(schedule)
    done: set[Action] = set()
    waiting = [deque(_groups(row, pairs)) for row in schedule.actions]
    moved = True
    while moved:
        moved = False
        for rank, groups in enumerate(waiting):
            needed = [each for action in groups[0] for each in waits_for(schedule, kinds, action)] if groups else []
            if groups and done.issuperset(needed):
                moved = True
                done.update(groups[0])
                yield rank, groups.popleft(), needed


def _groups(row: Sequence[Action], pairs: Collection[Action]) -> Iterator[tuple[Action, ...]]:
    remaining = iter(row)
    for action in remaining:
        yield (action, next(remaining)) if action in pairs else (action,)
