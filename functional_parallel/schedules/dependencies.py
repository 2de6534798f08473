"""Dependencies of an action: earlier actions of its stage on the microbatch, and the result of the adjacent stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .actions import Action, Schedule

__all__ = ["gradients_of_input", "replay", "waits_for"]


def waits_for(schedule: Schedule, kinds: Mapping[tuple[int, int], str], action: Action) -> list[Action]:
    """Return the actions that `action` depends on, beginning with that of the adjacent stage.

    Args:
        schedule: any schedule.
        kinds: for each stage and microbatch, the kind of the action that computes the gradient of the input, as
            `gradients_of_input(schedule)` returns it.
        action: the action that waits.

    Returns:
        One or two actions; an empty list for the forward of a first stage.
    """
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
    """Yield the actions in an order in which they could run sequentially. End early if all ranks wait.

    Args:
        schedule: any schedule.

    Yields:
        Rank and action, each action after all its dependencies. The ranks take turns, with one action per turn.
    """
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
