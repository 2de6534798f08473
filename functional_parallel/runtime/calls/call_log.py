"""What each rank is doing, told with every signal: ranks that do different things notice before they mix up messages.

All ranks make the same calls in the same order, so the n-th thing that one does is the n-th of all others. One that
reads parameters while another takes a step would else take the other's bytes for what it waits for.
"""

from __future__ import annotations

import functools
import weakref
import zlib
from typing import Protocol

from .waiting import CURRENT

__all__ = ["READS", "CallLog", "OutOfStepError", "is_ahead"]

READS = "reads a value that lies in parts"
_COUNT_FROM, _KIND_FROM = 32, 12  # bits of a mark: how many things, above which thing, above with what values
_MANY = 1_000  # descriptions to remember


class OutOfStepError(RuntimeError):
    """Ranks that were about to do different things, and would have waited for each other; says who what."""


class CallListener(Protocol):
    """Where others are told what this rank waits for outside of their memory."""

    def announce(self) -> None: ...


class CallLog:
    """What this rank is doing.

    Args:
        me: this rank's name, for messages.

    Attributes:
        mark: a number for it and for how many things it has done, the same on all ranks that are in step.
        count: how many things it has done.
    """

    def __init__(self, me: str = "this one") -> None:
        self._me = me
        self.mark = self.count = 0
        self._known = {_kind(READS): READS}
        self._told: weakref.WeakSet[CallListener] = weakref.WeakSet()

    def begin(self, what: str, values: int = 0) -> None:
        """Say what this rank does from now on.

        Args:
            what: to be read after "rank 0".
            values: a number from what it does it with, which all ranks shall have alike.
        """
        self.count += 1
        CURRENT.begin(what)
        kind = _kind(what)
        if kind not in self._known and len(self._known) < _MANY:
            self._known[kind] = what
        self.mark = self.count << _COUNT_FROM | kind << _KIND_FROM | values % (1 << _KIND_FROM)

    def brief(self, bits: int) -> int:
        """The mark in so many bits: another one for the next call, and for another kind of call almost always."""
        count, rest = divmod(self.mark, 1 << _COUNT_FROM)
        return (count + (rest >> _KIND_FROM)) % (1 << bits)

    def tell(self, told: CallListener) -> None:
        """Let `announce` go there too."""
        self._told.add(told)

    def announce(self) -> None:
        """Tell the others, before this rank waits for them where their signals do not reach it."""
        for each in self._told:
            each.announce()

    def refuse(self, other: int, who: str) -> None:
        """Say who does what.

        Raises:
            OutOfStepError: always.
        """
        if other >> _KIND_FROM == self.mark >> _KIND_FROM:
            raise OutOfStepError(
                f"the ranks were given different batches: {self._me} {self._name(self.mark)}, and {who} does with "
                "other values. Every process takes the whole batch: seed loaders alike, with torch.manual_seed(0) "
                "before the first draw, and let no rank draw more random numbers than another; or use "
                "train_step(batch='own') for shards that each rank loads itself"
            )
        raise OutOfStepError(
            f"the ranks are doing different things: {self._me} {self._name(self.mark)}, {who} {self._name(other)}. "
            "Every process must make the same calls in the same order, and train.params, train.whole and every "
            "compiled function are calls that all take part in: look for one under `if rank == 0`, for a step more, or "
            "a batch of another shape, on one rank, and for models in a set, which each process goes through in its "
            "own order. Where a call failed on one rank, all begin again from what was saved"
        )

    def _name(self, mark: int) -> str:
        count, rest = divmod(mark, 1 << _COUNT_FROM)
        return f"{self._known.get(rest >> _KIND_FROM, 'does what this one never did')} (its call {count})"


def is_ahead(other: int, own: int) -> bool:
    """Whether a rank with one mark has left, or never entered, what another with `own` does."""
    return other != own and other >> _COUNT_FROM >= own >> _COUNT_FROM


@functools.lru_cache(_MANY)
def _kind(what: str) -> int:
    return zlib.crc32(what.encode()) >> _KIND_FROM  # what is left fits between the two others
