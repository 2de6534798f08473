"""What an action waits for: its stage's earlier work on the microbatch, and the neighbouring stage's result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from .actions import Action, Schedule

__all__ = ["gradients_of_input", "replay", "waits_for"]


def waits_for(schedule: Schedule, kinds: Mapping[tuple[int, int], str], action: Action) -> list[Action]:
    """The actions whose results an action uses, the neighbouring stage's first.

    Args:
        schedule: any schedule.
        kinds: for stage and microbatch, which kind makes the gradient of the input: `gradients_of_input(schedule)`.
        action: the action that waits.

    Returns:
        One or two actions, none for the forward of a first stage.
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
    """For stage and microbatch, the kind that makes the gradient of the input: B or I."""
    return {(stage, microbatch): kind for kind, stage, microbatch in schedule if kind in "BI"}


def replay(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Each rank and action in an order in which all could run one after another; ends early when all ranks wait.

    Args:
        schedule: any schedule.

    Yields:
        Rank and action, every action after those it waits for; ranks take turns, one action each.
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
