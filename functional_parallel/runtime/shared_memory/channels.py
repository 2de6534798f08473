"""Messages from rank to rank of one host, through memory that both map.

Of every ordered pair of ranks, the sender has a stretch of memory that the receiver maps. It writes a message to the
lowest place that is free and signals where; the receiver copies it out and signals that it has. A rank that waits, for
a message or for room, takes in whatever has come meanwhile, so that ranks which wait for each other's room both get it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from ...collectives import ALIGNMENT, LARGEST, ROOM, aligned
from ..calls import CallLog

__all__ = ["LARGEST", "ROOM", "Channels"]

_MOST_UNDER_WAY = 32  # more signals than a socket's buffer holds must never be under way
_TAKEN = 1


class Signals(Protocol):
    """How a rank tells another, and waits to be told."""

    doing: CallLog

    def refuse(self, rank: int, mark: int) -> None: ...
    def tell(self, rank: int, note: int) -> None: ...
    def wait_until(self, missing: Callable[[], set[int]]) -> None: ...


class _Outgoing:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.under_way: deque[tuple[int, int]] = deque()

    def place(self, size: int) -> int | None:
        """The lowest free place; None where there is none."""
        if len(self.under_way) == _MOST_UNDER_WAY:
            return None
        begin = 0
        for taken, end in sorted(self.under_way):
            if begin + size <= taken:
                break
            begin = max(begin, end)
        return begin if begin + size <= ROOM else None


class _Incoming:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.arrived: deque[tuple[int, int]] = deque()  # where, and what its sender did
        self.expected: deque[_Expected] = deque()


class _Expected:
    __slots__ = ("_rank", "_signals", "into", "mark", "other")

    def __init__(self, into: Tensor, rank: int, signals: Signals) -> None:
        self.into, self._rank, self._signals, self.mark = into, rank, signals, signals.doing.mark
        self.other: int | None = None  # once it is here, what its sender did

    def wait(self) -> None:
        if self.other is None:
            self._signals.wait_until(lambda: {self._rank} if self.other is None else set())
        assert self.other is not None
        if self.other != self.mark:
            self._signals.refuse(self._rank, self.other)


class Channels:
    """This rank's channels to and from the others of its host.

    Args:
        signals: tells other ranks; what they tell comes to `told`.
        outgoing: by rank, `ROOM` bytes that it reads and this one writes.
        incoming: by rank, `ROOM` bytes that it writes and this one reads.
    """

    def __init__(self, signals: Signals, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        self._signals = signals
        self._outgoing = {rank: _Outgoing(memory) for rank, memory in outgoing.items()}
        self._incoming = {rank: _Incoming(memory) for rank, memory in incoming.items()}

    def send(self, message: Tensor, to: int) -> None:
        """Send a message of at most `LARGEST` bytes, which may change afterwards; waits only for room.

        Args:
            message: contiguous bytes.
            to: the rank.
        """
        channel, size = self._outgoing[to], aligned(message.numel())
        if (begin := channel.place(size)) is None:
            self._signals.wait_until(lambda: set() if channel.place(size) is not None else {to})
            begin = channel.place(size)
        assert begin is not None
        channel.memory[begin : begin + message.numel()].copy_(message)
        channel.under_way.append((begin, begin + size))
        self._signals.tell(to, _TAKEN + 1 + begin // ALIGNMENT)

    def receive(self, into: Tensor, source: int) -> _Expected:
        """Expect the next message of a rank; its `wait()` ends when the message is there, or is another one.

        Args:
            into: contiguous bytes, as many as the message has.
            source: the rank.
        """
        expected = _Expected(into, source, self._signals)
        self._incoming[source].expected.append(expected)
        self._take_in(source)
        return expected

    def told(self, rank: int, note: int, mark: int) -> None:
        """What another rank told this one, and what it did."""
        if note == _TAKEN:
            self._outgoing[rank].under_way.popleft()
        else:
            self._incoming[rank].arrived.append(((note - _TAKEN - 1) * ALIGNMENT, mark))
            self._take_in(rank)

    def _take_in(self, rank: int) -> None:
        channel = self._incoming[rank]
        while channel.arrived and channel.expected:
            (begin, mark), expected = channel.arrived.popleft(), channel.expected.popleft()
            if mark == expected.mark:
                expected.into.copy_(channel.memory[begin : begin + expected.into.numel()])
            expected.other = mark
            self._signals.tell(rank, _TAKEN)
