"""Allow one call at a time: overlapping calls of threads, signal handlers or forks have no order that ranks share."""

from __future__ import annotations

import os
import threading

from ...errors import CallMismatchError, CollectiveError, ReentrantCallError
from .waits import CURRENT


class CallGuard:
    """Lock of a call. After one overlap it refuses every call: each rank may have let a different one through."""

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
            raise ReentrantCallError(self._overlap)
        self._holder = threading.get_ident()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._free.release()
        if error is not None:
            CURRENT.fail(error)
        if isinstance(error, ReentrantCallError):  # raised by a nested call; this call had begun
            raise CallMismatchError(str(error)) from error


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
