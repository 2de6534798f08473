"""Waits of one rank for others: their names, their errors, and `CURRENT`, which the watch thread reads."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from sharding_specs import Mesh

from ...errors import CallMismatchError, CollectiveError

Errors = type[Exception] | tuple[type[Exception], ...]

_NUMBER = re.compile(r"rank <(\d+)>")  # in texts of the watch, which does not know the mesh
_SECONDS_FOR_NEWS = 5.0
_MOST_NAMES = 8
_REMEMBERED = 64  # calls
_TIMED_OUT = ("timed out", "timeout", "no signal from")


class Lost(NamedTuple):
    text: str  # empty if a rank died
    out_of_step: bool = False  # whether ranks made different calls


class Current:
    def __init__(self) -> None:
        self.calls: deque[str] = deque(maxlen=_REMEMBERED)  # descriptions, the newest last
        self.count = self.waits = 0  # calls, over all meshes, and waits so far
        self.step: int | None = None
        self.on: NamedWait | None = None  # the wait that this process is in
        self.failed: dict[int, str] = {}  # by number of a call that ended by an error on this rank
        self.forget()

    def forget(self) -> None:
        self.gone: dict[int, str] = {}  # by rank that died, in order of death, a description of its end
        self.left: dict[int, int] = {}  # by rank that ended normally, its number of calls
        self.lost: Lost | None = None
        self.learn: Callable[[float], None] = lambda seconds: None  # waits at most so long for news of the watch
        self.wake: Callable[[], None] = lambda: None  # makes the watch check immediately

    def begin(self, what: str) -> None:
        self.count += 1
        self.calls.append(what)

    def fail(self, error: BaseException) -> None:
        self.failed[self.count] = brief(error)
        self.wake()


def brief(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:2000]}" if lines else type(error).__name__


CURRENT = Current()


def note_step(step: int | None) -> None:
    CURRENT.step = step


def rank_name(mesh: Mesh, rank: int) -> str:
    """Return a rank's name in messages: its global rank and its mesh coordinates."""
    coordinates = ", ".join(f"{axis}={index}" for axis, index in mesh.coordinates(rank).items())
    return f"rank {rank} ({coordinates})" if coordinates else f"rank {rank}"


def rank_names(mesh: Mesh, ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _MOST_NAMES} more" if len(ranks) > _MOST_NAMES else ""
    return ", ".join(rank_name(mesh, rank) for rank in ranks[:_MOST_NAMES]) + more


class NamedWait:
    """A wait of this rank for `ranks`, which does `what`. `where` is the line of user code, if it is known."""

    __slots__ = ("_what", "mesh", "rank", "ranks", "where")

    def __init__(self, mesh: Mesh, rank: int, ranks: Sequence[int], what: str | Callable[[], str]) -> None:
        self.mesh, self.rank, self.ranks, self._what = mesh, rank, ranks, what
        self.where = ""

    @property
    def what(self) -> str:
        return self._what if isinstance(self._what, str) else self._what()

    @property
    def me(self) -> str:
        return rank_name(self.mesh, self.rank)

    def place(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what

    @contextmanager
    def noted(self, began: float | None = None, advice: str = "", kinds: Errors = RuntimeError) -> Iterator[None]:
        """Note this wait, which may have begun earlier, for a `with` block. Errors of torch become its `failure`."""
        began = time.monotonic() if began is None else began
        before, CURRENT.on = CURRENT.on, self
        CURRENT.waits += 1
        try:
            try:
                yield
            finally:
                CURRENT.on = before
        except (CallMismatchError, CollectiveError):
            raise
        except kinds as error:
            raise self.failure(time.monotonic() - began, error, advice) from error

    def failure(self, seconds: float | None, error: Exception | None = None, advice: str = "") -> Exception:
        """Return the error to raise. `error` is the transport's error; None if the watch ends the wait."""
        is_timeout = error is not None and any(text in str(error).lower() for text in _TIMED_OUT)
        if not is_timeout and CURRENT.lost is None:
            CURRENT.learn(_SECONDS_FOR_NEWS)
        where = f"{self.where}: " if self.where else ""
        if (lost := CURRENT.lost) is not None and lost.text:
            kind = CallMismatchError if lost.out_of_step else CollectiveError
            return kind(_NUMBER.sub(lambda found: rank_name(self.mesh, int(found[1])), lost.text))
        after = "" if seconds is None else f" after {seconds:.1f} s"
        parts = [f"{where}{self.me}: {self.what} failed{after}{_call()}: {self._cause(error, is_timeout)}", advice]
        if error is not None:
            parts.append(f"torch says: {error}")
        return CollectiveError(". ".join(part.rstrip(". ") for part in parts if part))

    def _cause(self, error: Exception | None, is_timeout: bool) -> str:
        others = [rank for rank in self.ranks if rank != self.rank]
        if CURRENT.gone:
            rank, how = next(iter(CURRENT.gone.items()))
            return f"{rank_name(self.mesh, rank)} {how}"
        if left := [rank for rank in others if rank in CURRENT.left]:
            return f"{rank_names(self.mesh, left)} ended its program, or called destroy_process_group"
        if is_timeout:
            return f"the timeout passed before {rank_names(self.mesh, others)} came to it"
        return f"a connection to {rank_names(self.mesh, others)} failed"


def _call() -> str:
    if not CURRENT.calls:
        return ""
    step = "" if CURRENT.step is None else f" in step {CURRENT.step}"
    return f"{step} (call {CURRENT.count}, which {CURRENT.calls[-1]})"
