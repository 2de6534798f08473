"""Check that the ranks of a group make the same call, if no signals through shared memory report it.

Messages and the backend's collectives carry bytes only, and two different calls may send equally many. The ranks
therefore exchange their call ids with the first collective of every call. The answer arrives with the first result.
"""

from __future__ import annotations

import torch

from ..calls import CollectiveSteps, GroupWaits, Waitable
from .algorithm_group import COMPLETED, RankGroup, TaggedMessages

__all__ = ["CallCheck"]


class CallCheck:
    """One rank's end of the check. The tag of messages is `ROLL_CALL`, so that ranks in other calls are heard too."""

    def __init__(self, ranks: RankGroup, messages: TaggedMessages, waits: GroupWaits) -> None:
        self._ranks, self._messages, self._waits = ranks, messages, waits
        self._asked = 0  # no call yet
        self._answer: Waitable = COMPLETED

    def ask(self) -> Waitable:
        """Send the id of this rank's call to the others, once per call. Wait for the answer before using their data.

        Waiting raises `CallMismatchError` if a rank makes a different call. All ranks ask before the same collectives.
        """
        if self._waits.doing.mark != self._asked:
            self._asked = self._waits.doing.mark
            self._answer = _Answer(self._ranks, self._messages, self._waits)
        return self._answer

    def before(self, steps: CollectiveSteps) -> CollectiveSteps:
        """Yield the steps of a collective. The first one also waits for the check that all ranks make the same call."""
        answer = self.ask()
        for awaited in steps:
            yield [answer, *awaited]


class _Answer:
    def __init__(self, ranks: RankGroup, messages: TaggedMessages, waits: GroupWaits) -> None:
        self._waits = waits
        self._mine = torch.tensor([waits.doing.mark], dtype=torch.int64, device="cpu")  # kept until it is sent
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
                self._waits.doing.refuse(int(mark), self._waits.name(rank))
        self._under_way = []
