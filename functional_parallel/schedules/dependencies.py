"""Dependencies of an action: earlier actions of its stage on the microbatch, and the result of the adjacent stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .actions import Action, Schedule

__all__ = ["gradients_of_input", "replay", "waits_for"]


def waits_for(schedule: Schedule, kinds: Mapping[tuple[int, int], str], action: Action) -> list[Action]:
    """Return what `action` depends on, first the action of the adjacent stage. `kinds`: see `gradients_of_input`."""
    kind, stage, microbatch = action
    if kind == "F":
        before = schedule.before(stage)
        return [] if before is None else [Action("F", before, microbatch)]
    if kind == "W":
        return [Action("I", stage, microbatch)]
    after = schedule.after(stage)
    own = Action("F", stage, microbatch)
    return [own] if after is None else [Action(kinds.get((after, microbatch), "B"), after, microbatch), own]


def gradients_of_input(schedule: Schedule) -> dict[tuple[int, int], str]:
    """Return, per stage and microbatch, the kind of the action that computes the gradient of the input: B or I."""
    return {(stage, microbatch): kind for kind, stage, microbatch in schedule if kind in "BI"}


def replay(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield rank and action in a sequential order of execution, one action per turn of a rank. End if all wait."""
    kinds = gradients_of_input(schedule)
    done: set[Action] = set()
    positions = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.actions):
            if positions[rank] == len(row):
                continue
            action = row[positions[rank]]
            if all(earlier in done for earlier in waits_for(schedule, kinds, action)):
                positions[rank] += 1
                moved = True
                done.add(action)
                yield rank, action
