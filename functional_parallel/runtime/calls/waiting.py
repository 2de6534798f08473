"""The current call and wait of this process, which the watch thread reads, and the findings of the watch.

Steps write a few attributes per call and per wait, without a lock. The watch reads them once a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .waits import NamedWait

__all__ = ["CURRENT", "Lost", "brief", "note_step"]

_REMEMBERED = 64


class Lost(NamedTuple):
    """The reason why no wait of this process can end."""

    text: str  # empty if a rank died
    out_of_step: bool = False  # whether ranks made different calls


class Current:
    """The state of this process."""

    def __init__(self) -> None:
        self.calls: deque[str] = deque(maxlen=_REMEMBERED)  # descriptions, the newest last
        self.count = self.waits = 0  # calls, over all meshes, and waits so far
        self.step: int | None = None
        self.on: NamedWait | None = None  # the wait that this process is in
        self.failed: dict[int, str] = {}  # by number of a call that ended by an error on this rank
        self.forget()

    def forget(self) -> None:
        """Discard the findings about other ranks, for new process groups or in a forked process."""
        self.gone: dict[int, str] = {}  # by rank that died, in order of death, a description of its end
        self.left: dict[int, int] = {}  # by rank that ended normally, its number of calls
        self.lost: Lost | None = None
        self.learn: Callable[[float], None] = lambda seconds: None  # waits at most so long for news of the watch
        self.wake: Callable[[], None] = lambda: None  # makes the watch check immediately

    def begin(self, what: str) -> None:
        self.count += 1
        self.calls.append(what)

    def fail(self, error: BaseException) -> None:
        """Note that the current call ended by an error on this rank."""
        self.failed[self.count] = brief(error)
        self.wake()


def brief(error: BaseException) -> str:
    """Return an error's kind and the first line of its text."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:2000]}" if lines else type(error).__name__


CURRENT = Current()


def note_step(step: int | None) -> None:
    """Note that a training step begins. None means that it has ended. Messages name the step."""
    CURRENT.step = step
