"""Whether the ranks of a group do the same, where no signals through shared memory say so.

Messages and the backend's collectives carry bytes alone, and those of two calls may be equally many. So with the first
collective of every call the ranks tell each other what they do. The answer comes with the first result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .doing import Doing
from .running import Steps, Waitable

__all__ = ["RollCall"]


class RollCall:
    """One rank's end of it.

    Args:
        handle: torch's process group.
        seats: for each rank, its number in torch's group.
        doing: what this rank is doing.
    """

    def __init__(self, handle: Any, seats: Sequence[int], doing: Doing) -> None:
        self._handle, self._seats, self._doing = handle, seats, doing
        self._asked = doing.mark
        self._answer: Waitable = _Known()

    def ask(self) -> Waitable:
        """Tell the others what this rank does, if it has not; to be waited for before anything of theirs is used.

        Waiting raises `OutOfStepError` when a rank does something else. All ranks ask before the same collectives.
        """
        if self._doing.mark != self._asked:
            self._asked = self._doing.mark
            self._answer = _Answer(self._handle, self._seats, self._doing)
        return self._answer

    def before(self, steps: Steps) -> Steps:
        """The steps of a collective, after the first of which it is clear that it is one."""
        answer = self.ask()
        for awaited in steps:
            yield [answer, *awaited]


class _Known:
    def wait(self) -> None:
        pass


class _Answer:
    def __init__(self, handle: Any, seats: Sequence[int], doing: Doing) -> None:
        self._seats, self._doing = seats, doing
        self._marks = [torch.zeros(1, dtype=torch.int64) for _ in seats]
        mine = torch.tensor([doing.mark], dtype=torch.int64)
        self._work: Any = dist.all_gather(self._marks, mine, group=handle, async_op=True)

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        for rank, seat in enumerate(self._seats):
            if (mark := int(self._marks[seat])) != self._doing.mark:
                self._doing.refuse(mark, f"rank {rank} of the group")
        self._work = None
