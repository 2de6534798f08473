"""Point-to-point messages of a schedule, in an order that needs no tags and cannot deadlock.

Messages without tags arrive in the order of the sends, so receives between two ranks must have the same order. One
traversal over all ranks, which is a valid order of execution, adds a send and its receive at the same moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..errors import ScheduleError
from .actions import Action, Schedule
from .predecessors import gradients_of_input, receiving_stage, replay, waits_for


class Send(NamedTuple):
    """Send the result of `action` to `rank`, which holds the adjacent stage."""

    action: Action
    rank: int

    def __str__(self) -> str:
        return f"send {self.action} to {self.rank}"


class Receive(NamedTuple):
    """Receive the result of `action` from `rank`."""

    action: Action
    rank: int

    def __str__(self) -> str:
        return f"receive {self.action} from {self.rank}"


Instruction = Action | Send | Receive


def messages(schedule: Schedule) -> tuple[tuple[Instruction, ...], ...]:
    """Return the actions of each rank together with their sends and receives.

    >>> from functional_parallel import schedules
    >>> for row in schedules.messages(schedules.gpipe(2, 1)):
    ...     print(", ".join(map(str, row)))
    0F0, send 0F0 to 1, receive 1B0 from 1, 0B0
    receive 0F0 from 0, 1F0, 1B0, send 1B0 to 0

    Args:
        schedule: a schedule that passes `check`. Stages on the same rank exchange values without a message.

    Returns:
        One tuple per rank of `Action`, `Send` and `Receive`, in the order of issue. Sends may run in the background or
        block until they are received.

    Raises:
        ScheduleError: if the ranks wait for each other.
    """
    steps: list[list[Instruction]] = [[] for _ in schedule.actions]
    ran = 0
    for rank, action in replay(schedule):
        steps[rank].append(action)
        ran += 1
        stage = receiving_stage(schedule, action)
        other = rank if stage is None else schedule.rank_of_stage[stage]
        if other != rank:
            steps[rank].append(Send(action, other))
            steps[other].append(Receive(action, rank))
    if ran < sum(map(len, schedule.actions)):
        raise ScheduleError(f"{schedule.name}: its ranks wait for each other; `check` names the actions")
    return tuple(map(tuple, steps))


def check_messages(schedule: Schedule, steps: Sequence[Sequence[Instruction]], tagged: bool = False) -> None:
    """Check an order of sends and receives. It must be correct even if sends block until they are received.

    Args:
        schedule: the schedule that the steps belong to.
        steps: for each rank, its actions, sends and receives: `messages(schedule)`, or a user-defined order.
        tagged: whether messages carry tags. Tagged messages may be received in another order than they were sent, and
            their sends do not block.

    Raises:
        ScheduleError: if the order is wrong. The message names the ranks, and the faulty message or action.
    """
    _check_same_order(schedule, steps, tagged)
    _run(schedule, steps, gradients_of_input(schedule), waiting=not tagged)


def _check_same_order(schedule: Schedule, steps: Sequence[Sequence[Instruction]], tagged: bool) -> None:
    for sender in range(len(steps)):
        for receiver in range(len(steps)):
            sent = [step.action for step in steps[sender] if isinstance(step, Send) and step.rank == receiver]
            got = [step.action for step in steps[receiver] if isinstance(step, Receive) and step.rank == sender]
            if sorted(sent) != sorted(got):
                odd = sorted(set(sent) ^ set(got))
                detail = f"and {odd[0]} is on one side only" if odd else "some of them twice"
                raise ScheduleError(
                    f"{schedule.name}: rank {sender} sends {len(sent)} messages to rank {receiver}, which receives "
                    f"{len(got)}, {detail}"
                )
            if sent != got and not tagged:
                first = next(number for number, pair in enumerate(zip(sent, got, strict=True)) if pair[0] != pair[1])
                raise ScheduleError(
                    f"{schedule.name}: message {first} from rank {sender} to rank {receiver} is {sent[first]}, but the "
                    f"receiver expects {got[first]}: tag the messages, or receive in the order of `messages`"
                )


def _run(
    schedule: Schedule, steps: Sequence[Sequence[Instruction]], kinds: Mapping[tuple[int, int], str], waiting: bool
) -> None:
    positions = [0] * len(steps)
    have: list[set[Action]] = [set() for _ in steps]  # actions with a result on the rank: computed or received
    sent: set[Action] = set()

    def head(rank: int) -> Instruction | None:
        return steps[rank][positions[rank]] if positions[rank] < len(steps[rank]) else None

    def ready(rank: int, step: Instruction) -> bool:
        if isinstance(step, Action):
            return all(earlier in have[rank] for earlier in waits_for(schedule, kinds, step))
        if isinstance(step, Receive):
            return step.action in sent
        return step.action in have[rank] and (not waiting or head(step.rank) == Receive(step.action, rank))

    moved = True
    while moved:
        moved = False
        for rank in range(len(steps)):
            while (step := head(rank)) is not None and ready(rank, step):
                done = step if isinstance(step, Action) else step.action
                (sent if isinstance(step, Send) else have[rank]).add(done)
                positions[rank] += 1
                moved = True
                if isinstance(step, Send) and waiting:  # the matching receive has completed too
                    have[step.rank].add(step.action)
                    positions[step.rank] += 1
    stuck = [f"rank {rank} at {step}" for rank in range(len(steps)) if (step := head(rank)) is not None]
    if stuck:
        raise ScheduleError(f"{schedule.name}: no rank can continue: {'; '.join(stuck)}")
