"""Connect the ranks of one host and map their memory into each other."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ..calls import CallLog
from .memory import MappedMemory, SharedMemory, anonymous_memory

__all__ = ["connect", "host_identity"]

_HELLO = struct.Struct("<16si")
_SECONDS_TO_MEET = 20.0

AllGatherObject = Callable[[Any], list[Any]]  # exchanges one object per rank of the group; the same list on all ranks


def host_identity() -> str:
    """Return an id that is equal for processes that Unix sockets can connect: one kernel, one network namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)


def connect(
    rank: int,
    members: Sequence[int],
    exchange: AllGatherObject,
    timeout: float,
    doing: CallLog | None = None,
    names: Sequence[str] | None = None,
) -> SharedMemory | None:
    """Share memory with the ranks of the group on this host, whose ascending numbers are `members`.

    `exchange` is a collective over the entire group, of which every rank calls `connect`. Once connected, waits for
    signals end after `timeout` seconds. The memory numbers ranks by their index in `members`. The result is None for a
    single member, and on all ranks of the group if the system of some rank does not support sharing.
    """
    me = list(members).index(rank)
    with ExitStack() as stack:
        listener, address = _listen(stack)
        secret = secrets.token_bytes(16)
        greetings = exchange((address, secret))
        here = [greetings[member] for member in members]
        seconds = min(_SECONDS_TO_MEET, timeout)
        calls = _Connections(me, here, seconds)
        stack.callback(calls.close)
        reached = exchange(listener is not None and calls.reached)  # else ranks that are not called would wait
        shared = None
        if listener is not None and all(reached):
            with suppress(OSError):
                peers, memory = calls.meet(listener)
                for peer in peers.values():
                    peer.settimeout(timeout)
                shared = SharedMemory(me, peers, memory, timeout, doing, names)
        everywhere = all(exchange(shared is not None))
        return shared if everywhere and len(members) > 1 else None


class _Connections:
    """Connections to the lower ranks, with a descriptor to map this rank's memory. An answer is not awaited."""

    def __init__(self, me: int, greetings: Sequence[tuple[str | None, bytes]], seconds: float) -> None:
        self._me, self._greetings, self._seconds = me, greetings, seconds
        self.peers: dict[int, socket.socket] = {}
        self.descriptor: int | None = None
        try:
            self.descriptor = anonymous_memory(MappedMemory.size(len(greetings)))
            for number, (address, secret) in enumerate(greetings[:me]):
                self.peers[number] = _call(me, address, secret, self.descriptor, seconds)
            self.reached = True
        except OSError:  # also if ranks only seem to be on one host
            self.reached = False

    def meet(self, listener: socket.socket) -> tuple[dict[int, socket.socket], list[MappedMemory]]:
        """Receive the answers of lower ranks and answer higher ranks. Hand over the connections.

        File descriptors of the memory are exchanged with both.
        """
        me, ranks, secret = self._me, len(self._greetings), self._greetings[self._me][1]
        peers, memory = self.peers, dict[int, MappedMemory]()
        assert self.descriptor is not None
        while len(peers) < ranks - 1:
            number, peers[number], memory[number] = _answer(listener, secret, self.descriptor, ranks, self._seconds)
        for number in range(me):
            memory[number] = _received(peers[number], 1, ranks)[1]
        descriptor, self.descriptor = self.descriptor, None
        memory[me] = MappedMemory(descriptor, ranks)
        self.peers = {}
        return peers, [memory[number] for number in range(ranks)]

    def close(self) -> None:
        """Close the connections and the descriptor that `meet` did not hand over."""
        for peer in self.peers.values():
            peer.close()
        if self.descriptor is not None:
            os.close(self.descriptor)


def _listen(stack: ExitStack) -> tuple[socket.socket | None, str | None]:
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket, "send_fds"):
        return None, None
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    if sys.platform == "linux":  # a name outside the file system
        address = f"\0functional_parallel-{secrets.token_hex(16)}"
    else:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fp"))
        address = str(Path(folder) / "s")
    try:
        listener.bind(address)
        listener.listen(1024)
    except OSError:
        return None, None
    return listener, address


def _call(me: int, address: str | None, secret: bytes, descriptor: int, seconds: float) -> socket.socket:
    if address is None:
        raise OSError("no Unix sockets there")
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(seconds)
        peer.connect(address)
        socket.send_fds(peer, [_HELLO.pack(secret, me)], [descriptor])
    except OSError:
        peer.close()
        raise
    return peer


def _answer(
    listener: socket.socket, secret: bytes, descriptor: int, ranks: int, seconds: float
) -> tuple[int, socket.socket, MappedMemory]:
    """Accept the next call of a rank that sends the secret."""
    listener.settimeout(seconds)
    while True:
        peer, _ = listener.accept()
        peer.settimeout(seconds)
        data, memory = _received(peer, _HELLO.size, ranks)
        said, number = _HELLO.unpack(data)
        if secrets.compare_digest(said, secret):
            socket.send_fds(peer, [b"!"], [descriptor])
            return number, peer, memory
        peer.close()


def _received(peer: socket.socket, size: int, ranks: int) -> tuple[bytes, MappedMemory]:
    data, descriptors, _, _ = socket.recv_fds(peer, size, 1)
    if len(data) != size or len(descriptors) != 1:
        raise ConnectionError("a rank on this host ended, or something else called")
    return data, MappedMemory(descriptors[0], ranks)
