"""Log of this rank's calls. Signals carry its mark, so that ranks in different calls do not mix up their messages."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...errors import CallMismatchError
from .waits import CURRENT

READS = "reads a value that lies in parts"
_COUNT_FROM, _KIND_FROM = 32, 12  # bits of a mark: from the top the call count, the kind of call, its values
SAME_CALLS = (
    "Every process must make the same calls, also train.params and train.whole: look for one under `if rank == 0`, for "
    "a step more, or a batch of another shape, on one rank"
)
_MANY = 1_000  # largest number of remembered descriptions


class CallListener(Protocol):
    def announce(self) -> None: ...


class CallLog:
    """The current call of this rank. Ranks that make the same calls have the same mark, the id of their call."""

    def __init__(self, me: str = "this one") -> None:
        self._me = me
        self.mark = self.count = 0  # id of the current call, and the number of calls so far
        self._known = {_kind(READS): READS}
        self._told: weakref.WeakSet[CallListener] = weakref.WeakSet()

    def begin(self, what: str, values: int = 0) -> None:
        """Begin a call. `what` is read after "rank 0"; `values` is computed from its inputs and equal on all ranks."""
        self.count += 1
        CURRENT.begin(what)
        kind = _kind(what)
        if kind not in self._known and len(self._known) < _MANY:
            self._known[kind] = what
        self.mark = self.count << _COUNT_FROM | kind << _KIND_FROM | values % (1 << _KIND_FROM)

    def brief(self, bits: int) -> int:
        """Return the mark in `bits` bits. It differs for the next call, and almost always for another kind of call."""
        count, rest = divmod(self.mark, 1 << _COUNT_FROM)
        return (count + (rest >> _KIND_FROM)) % (1 << bits)

    def tell(self, told: CallListener) -> None:
        self._told.add(told)

    def announce(self) -> None:
        for each in self._told:
            each.announce()

    def refuse(self, other: int, who: str) -> None:
        if other >> _KIND_FROM == self.mark >> _KIND_FROM:
            raise CallMismatchError(
                f"the ranks were given different batches: {self._me} {self._name(self.mark)}, and {who} does with "
                "other values. Every process takes the whole batch: call torch.manual_seed(0) before the first draw, "
                "and draw alike on every rank; or use train_step(batch='own') for shards that each rank loads itself"
            )
        raise CallMismatchError(
            f"the ranks are doing different things: {self._me} {self._name(self.mark)}, {who} {self._name(other)}. "
            f"{SAME_CALLS}, and for loops over a set. Where a call failed on one rank, all begin again from what was "
            "saved"
        )

    def _name(self, mark: int) -> str:
        count, rest = divmod(mark, 1 << _COUNT_FROM)
        return f"{self._known.get(rest >> _KIND_FROM, 'does what this one never did')} (its call {count})"


@dataclass(frozen=True)
class GroupWaits:
    timeout: float = 600.0  # seconds to wait for another rank
    doing: CallLog = field(default_factory=CallLog)
    names: Sequence[str] = ()

    def name(self, rank: int) -> str:
        return self.names[rank] if self.names else f"rank {rank} of the group"


def is_ahead(other: int, own: int) -> bool:
    """Whether the rank with mark `other` has left the call with mark `own`, or never entered it."""
    return other != own and other >> _COUNT_FROM >= own >> _COUNT_FROM


@functools.lru_cache(_MANY)
def _kind(what: str) -> int:
    return zlib.crc32(what.encode()) >> _KIND_FROM  # 20 bits, between the count and the values
