"""One call at a time: what the ranks of a mesh do has one order, and calls that overlap on a rank have none.

Two threads take turns as each process happens to schedule them, a signal's handler runs wherever it interrupts, and a
forked process holds its parent's connections without being a rank. Each would take bytes that others wait for.
"""

from __future__ import annotations

import os
import threading

from .call_log import OutOfStepError
from .waiting import CURRENT
from .waits import CollectiveError

__all__ = ["CallGuard", "OverlapError"]


class OverlapError(OutOfStepError):
    """A call that began before another one of this process was done; nothing of it ran."""


class CallGuard:
    """Held while a call goes on; refused meanwhile, and in other processes than the one that made it.

    Once it was refused it always is: which call came through may be another one on every rank.
    """

    __slots__ = ("_free", "_holder", "_overlap", "_process")

    def __init__(self) -> None:
        self._process, self._holder, self._overlap = os.getpid(), 0, ""
        self._free = threading.Lock()

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise CollectiveError(
                f"process {os.getpid()} was forked from process {self._process}, which is a rank; this one is none, "
                "and must use none of its connections. Workers of a DataLoader and other children call no train step "
                "and no compiled function: let the rank itself do so"
            )
        if not self._overlap and not self._free.acquire(blocking=False):
            self._overlap = _overlap(self._holder)
        if self._overlap:
            raise OverlapError(self._overlap)
        self._holder = threading.get_ident()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._free.release()
        if error is not None:
            CURRENT.fail(error)
        if isinstance(error, OverlapError):  # of a call inside of this one, which had begun
            raise OutOfStepError(str(error)) from error


def _overlap(holder: int) -> str:
    if holder == threading.get_ident():
        return (
            "a call began before the one was done that its thread was in, as in a signal's handler, where every rank "
            "comes to it at another place. Let the handler set a flag, and look at it after the step"
        )
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return (
        f"thread {threading.current_thread().name!r} began a call while thread {names.get(holder, holder)!r} was in "
        "one, and other ranks may come to them in the other order. Call train steps, train.params, train.whole and "
        "compiled functions from one thread; one that writes checkpoints is given what train.whole(state) returned"
    )
