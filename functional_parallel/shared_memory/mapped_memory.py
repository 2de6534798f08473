"""Unnamed memory that the ranks of one host share, and the signals through Unix sockets that report its contents.

Memory is allocated from two halves in turn: a rank that has filled one continues in the other, after all ranks have
read it. That depends on the sizes of the collectives only, so all ranks do it at the same point of their program. A
half grows to the size that the largest collective needs.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from ..runtime import CURRENT, GroupWaits, Waitable, is_ahead
from .channels import Channels
from .slots import HALF, ROOM, SMALL_HALF, aligned

_MOST_IN_A_HALF = 32  # the signals in flight must fit a socket's buffer
_SIGNAL = struct.Struct("<qq")  # a number, and the rank's call id
_MOST_NOTICES = 8  # notices that may be unread at the same time
_LOOK_EVERY = 1.0  # seconds between checks for findings of the watch
_WHENEVER = -1  # replaces the call id in a signal that belongs to no call
_MADV_POPULATE_WRITE = 23  # of Linux; Python does not define it

# They run to the first `yield` at the start of a collective, and to the end at its wait; they yield what to wait for.
CollectiveSteps = Generator[Sequence[Waitable], None, None]


class RunningCollective:
    __slots__ = ("_awaited", "_steps")

    def __init__(self, steps: CollectiveSteps) -> None:
        self._steps: CollectiveSteps | None = steps
        self._awaited: Sequence[Waitable] = ()
        self.step()

    def wait(self) -> None:
        while self._steps is not None:
            self.step()

    def step(self) -> None:
        assert self._steps is not None
        for message in self._awaited:
            message.wait()
        try:
            self._awaited = next(self._steps)
        except StopIteration:
            self._steps, self._awaited = None, ()


@dataclass(slots=True, eq=False)
class Slot:
    """Slice at one offset of every rank's memory, as bytes by rank, until `done`."""

    parts: list[Tensor]
    _half: _Half

    def done(self) -> None:
        """Note that this rank has read everything that it needs. Call this before requesting another slot."""
        self.parts = []
        self._half.read += 1
        self._half.release_when_read()


class _Half:
    def __init__(self, begin: int, send: Callable[[int], None]) -> None:
        self.begin, self._send = begin, send
        self.running: list[tuple[RunningCollective, Slot]] = []
        self.left_as = 0
        self.enter()

    def enter(self) -> None:
        self.used = self.given = self.read = 0
        self.left = False
        self.running.clear()

    def leave(self, number: int) -> None:
        self.left, self.left_as = True, number
        self.release_when_read()

    def release_when_read(self) -> None:
        if self.left and self.read == self.given:
            self.left = False
            self._send(self.left_as)


class SharedMemory:
    def __init__(
        self, rank: int, peers: dict[int, socket.socket], memory: Sequence[MappedMemory], waits: GroupWaits
    ) -> None:
        self.rank, self.size = rank, len(memory)
        self._peers, self._memory, self._waits, self.doing = peers, memory, waits, waits.doing
        self.doing.tell(self)
        weakref.finalize(self, _close, list(peers.values()))
        _living.add(self)
        self._poll = select.poll()
        self._rank_of = {peer.fileno(): number for number, peer in peers.items()}
        for peer in peers.values():
            self._poll.register(peer, select.POLLIN)
        self._arrived: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._last: dict[int, int] = {}  # by rank, the call id that it last sent
        self._notices = 0
        self._unfinished = {number: b"" for number in peers}
        self._ended: set[int] = set()
        self._numbers = 0
        self._last_slot: Slot | None = None
        self._grown = 0  # bytes of a half that are in use
        self._halves = [_Half(0, self._signal_read), _Half(HALF, self._signal_read)]
        self.channels = Channels(
            weakref.proxy(self),
            {number: memory[rank].channels[number] for number in peers},
            {number: memory[number].channels[rank] for number in peers},
        )

    # --- signals ---

    def next_number(self) -> int:
        """Return a number for a signal that each rank sends once. It is the same on all ranks."""
        self._numbers += 1
        return self._numbers

    def signal(self, number: int) -> None:
        self._send(self._peers, number, self.doing.mark)

    def _signal_read(self, number: int) -> None:
        """Signal to all others that this rank has read a half. The signal may arrive there during another call."""
        self._send(self._peers, number, _WHENEVER)

    def announce(self) -> None:
        if self._notices < _MOST_NOTICES:
            self._notices += 1
            self._send(self._peers, 0, self.doing.mark)

    def tell(self, rank: int, note: int) -> None:
        self._send((rank,), -note, self.doing.mark)

    def _send(self, ranks: Iterable[int], number: int, mark: int) -> None:
        message = _SIGNAL.pack(number, mark)
        for rank in ranks:
            try:
                self._peers[rank].sendall(message)
            except ConnectionError:
                continue
            except TimeoutError as error:
                raise RuntimeError(f"{self._called({rank})} reads no signals") from error

    def all_gave(self, number: int) -> Waitable:
        return _Signal(self, number)

    def wait_for(self, number: int, mark: int = _WHENEVER) -> None:
        self.wait_until(lambda: self._peers.keys() - self._arrived[number].keys())
        self._notices = 0
        for rank, other in self._arrived.pop(number).items():
            if mark not in (other, _WHENEVER):
                self.refuse(rank, other)

    def wait_until(self, missing: Callable[[], set[int]]) -> None:
        """Read signals until no rank is missing. An error names the rank that ended, is late or is in another call."""
        began = time.monotonic()
        while ranks := missing():
            for rank in ranks & self._last.keys():
                if is_ahead(self._last[rank], self.doing.mark):
                    self.refuse(rank, self._last[rank])
            if ended := ranks & self._ended:
                raise RuntimeError(f"{self._called(ended)} ended")
            seconds = time.monotonic() - began
            if seconds > self._waits.timeout:
                raise RuntimeError(f"no signal from {self._called(ranks)} in {seconds:.1f} s")
            if CURRENT.lost is not None:
                raise RuntimeError(f"the wait for {self._called(ranks)} was ended")
            for descriptor, _ in self._poll.poll(min(self._waits.timeout - seconds, _LOOK_EVERY) * 1000 + 1):
                self._read_signals(self._rank_of[descriptor])

    def refuse(self, rank: int, mark: int) -> None:
        self.doing.refuse(mark, self._called({rank}))

    def _called(self, ranks: set[int]) -> str:
        return ", ".join(self._waits.name(rank) for rank in sorted(ranks))

    def _read_signals(self, rank: int) -> None:
        try:
            data = self._peers[rank].recv(4096)
        except ConnectionError:
            data = b""
        if not data:
            self._ended.add(rank)
            self._poll.unregister(self._peers[rank])
        data = self._unfinished[rank] + data
        whole = len(data) // _SIGNAL.size * _SIGNAL.size
        self._unfinished[rank] = data[whole:]
        for number, mark in _SIGNAL.iter_unpack(data[:whole]):
            if number > 0:
                self._arrived[number][rank] = mark
            elif number < 0:
                self.channels.told(rank, -number, mark)
            if mark != _WHENEVER:
                self._last[rank] = mark

    # --- memory ---

    def run(self, steps: CollectiveSteps) -> RunningCollective:
        """Start an algorithm that requests at most one slot before its first `yield`."""
        self._last_slot = None
        running = RunningCollective(steps)
        if self._last_slot is not None:
            self._halves[0].running.append((running, self._last_slot))
        return running

    def slot(self, size: int) -> Slot:
        assert size <= HALF, size
        size = aligned(size)
        self._grow(max(size, min(SMALL_HALF, HALF)))
        half = self._halves[0]
        if half.used + size > self._grown or half.given == _MOST_IN_A_HALF:
            half = self._turn()
        begin = half.begin + half.used
        half.used += size
        half.given += 1
        self._last_slot = Slot([memory.halves[begin : begin + size] for memory in self._memory], half)
        return self._last_slot

    def _grow(self, size: int) -> None:
        if size > self._grown:
            for piece in self._memory:
                for begin in (0, HALF):
                    piece.populate(begin + self._grown, begin + size)
            self._grown = size

    def _turn(self) -> _Half:
        old, new = self._halves
        old.leave(self.next_number())
        for running, slot in new.running:
            while slot.parts:
                running.step()
        if new.left_as:  # 0: never used so far
            self.wait_for(new.left_as)
        new.enter()
        self._halves = [new, old]
        return new


def _close_in_child() -> None:  # else it would hold the connections, and its parent's death would not be noticed
    for memory in list(_living):
        _close(list(memory._peers.values()))


_living: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


class _Signal:
    __slots__ = ("_mark", "_memory", "_number")

    def __init__(self, memory: SharedMemory, number: int) -> None:
        self._memory, self._number, self._mark = memory, number, memory.doing.mark

    def wait(self) -> None:
        self._memory.wait_for(self._number, self._mark)


# --- Memory without a name ---


def anonymous_memory(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("functional_parallel")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class MappedMemory:
    """One rank's memory, mapped: two halves for collectives, and a channel to every rank."""

    def __init__(self, descriptor: int, ranks: int) -> None:
        try:
            self._halves = mmap.mmap(descriptor, 2 * HALF)
            rooms = mmap.mmap(descriptor, ranks * ROOM, offset=2 * HALF)
        finally:
            os.close(descriptor)
        self.halves = torch.frombuffer(self._halves, dtype=torch.uint8)
        self.channels = torch.frombuffer(rooms, dtype=torch.uint8).chunk(ranks)

    def populate(self, begin: int, end: int) -> None:
        """Populate the pages of these bytes in one call, if possible. One fault per page costs more than copying."""
        if sys.platform == "linux":
            begin -= begin % mmap.PAGESIZE
            with suppress(OSError):  # before Linux 5.14
                self._halves.madvise(_MADV_POPULATE_WRITE, begin, end - begin)

    @staticmethod
    def size(ranks: int) -> int:
        return 2 * HALF + ranks * ROOM
