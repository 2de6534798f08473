"""Whether the ranks of a group do the same, where no signals through shared memory say so.

Messages and the backend's collectives carry bytes alone, and those of two calls may be equally many. So with the first
collective of every call the ranks tell each other what they do. The answer comes with the first result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..calls import CallLog, CollectiveSteps, Waitable
from .algorithm_group import COMPLETED, RankGroup, TaggedMessages

__all__ = ["CallCheck"]


class CallCheck:
    """One rank's end of it.

    Args:
        ranks: of the group.
        messages: between them, under the tag `ROLL_CALL`, since who does something else must be heard too.
        doing: what this rank is doing.
        names: the ranks' names, for messages.
    """

    def __init__(self, ranks: RankGroup, messages: TaggedMessages, doing: CallLog, names: Sequence[str]) -> None:
        self._ranks, self._messages, self._doing, self._names = ranks, messages, doing, names
        self._asked = 0  # nothing yet
        self._answer: Waitable = COMPLETED

    def ask(self) -> Waitable:
        """Tell the others what this rank does, if it has not; to be waited for before anything of theirs is used.

        Waiting raises `OutOfStepError` when a rank does something else. All ranks ask before the same collectives.
        """
        if self._doing.mark != self._asked:
            self._asked = self._doing.mark
            self._answer = _Answer(self._ranks, self._messages, self._doing, self._names)
        return self._answer

    def before(self, steps: CollectiveSteps) -> CollectiveSteps:
        """The steps of a collective, after the first of which it is clear that it is one."""
        answer = self.ask()
        for awaited in steps:
            yield [answer, *awaited]


class _Answer:
    def __init__(self, ranks: RankGroup, messages: TaggedMessages, doing: CallLog, names: Sequence[str]) -> None:
        self._doing, self._names = doing, names
        self._mine = torch.tensor([doing.mark], dtype=torch.int64, device="cpu")  # kept until it has left
        self._marks = {rank: torch.zeros(1, dtype=torch.int64, device="cpu") for rank in ranks.others()}
        receiving = [messages.receive(mark, rank) for rank, mark in self._marks.items()]
        self._under_way = [*receiving, *(messages.send(self._mine, rank) for rank in self._marks)]

    def wait(self) -> None:
        if not self._under_way:
            return
        for message in self._under_way:
            message.wait()
        for rank, mark in self._marks.items():
            if int(mark) != int(self._mine):
                self._doing.refuse(int(mark), self._names[rank])
        self._under_way = []
