"""Messages between ranks of one host: the sender writes them into memory that the receiver maps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from ..runtime import CallLog
from .slots import ALIGNMENT, ROOM, aligned

_MOST_UNDER_WAY = 32  # the signals in flight must fit a socket's buffer
_TAKEN = 1


class Signals(Protocol):
    doing: CallLog

    def refuse(self, rank: int, mark: int) -> None: ...
    def tell(self, rank: int, note: int) -> None: ...
    def wait_until(self, missing: Callable[[], set[int]]) -> None: ...


class _Outgoing:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.under_way: deque[tuple[int, int]] = deque()

    def place(self, size: int) -> int | None:
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
        self.arrived: deque[tuple[int, int]] = deque()  # offset of a message, and its sender's call id
        self.expected: deque[_Expected] = deque()


class _Expected:
    __slots__ = ("_rank", "_signals", "into", "mark", "other")

    def __init__(self, into: Tensor, rank: int, signals: Signals) -> None:
        self.into, self._rank, self._signals, self.mark = into, rank, signals, signals.doing.mark
        self.other: int | None = None  # the sender's call id, once the message has arrived

    def wait(self) -> None:
        if self.other is None:
            self._signals.wait_until(lambda: {self._rank} if self.other is None else set())
        assert self.other is not None
        if self.other != self.mark:
            self._signals.refuse(self._rank, self.other)


class Channels:
    """This rank's channels to and from the other ranks of its host. Signals of other ranks are passed to `told`."""

    def __init__(self, signals: Signals, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        self._signals = signals
        self._outgoing = {rank: _Outgoing(memory) for rank, memory in outgoing.items()}
        self._incoming = {rank: _Incoming(memory) for rank, memory in incoming.items()}

    def send(self, message: Tensor, to: int) -> None:
        """Send contiguous bytes, at most `LARGEST`. They may change after the call. It waits only for free memory."""
        channel, size = self._outgoing[to], aligned(message.numel())
        if (begin := channel.place(size)) is None:
            self._signals.wait_until(lambda: set() if channel.place(size) is not None else {to})
            begin = channel.place(size)
        assert begin is not None
        channel.memory[begin : begin + message.numel()].copy_(message)
        channel.under_way.append((begin, begin + size))
        self._signals.tell(to, _TAKEN + 1 + begin // ALIGNMENT)

    def receive(self, into: Tensor, source: int) -> _Expected:
        expected = _Expected(into, source, self._signals)
        self._incoming[source].expected.append(expected)
        self._take_in(source)
        return expected

    def told(self, rank: int, note: int, mark: int) -> None:
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
