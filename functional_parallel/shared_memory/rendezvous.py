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
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..runtime import GroupWaits
from .mapped_memory import MappedMemory, SharedMemory, anonymous_memory

_HELLO = struct.Struct("<16si")
_SECONDS_TO_MEET = 20.0

AllGatherObject = Callable[[Any], list[Any]]  # exchanges one object per rank of the group; the same list on all ranks


def connect(rank: int, members: Sequence[int], exchange: AllGatherObject, waits: GroupWaits) -> SharedMemory | None:
    me, ranks, seconds = list(members).index(rank), len(members), min(_SECONDS_TO_MEET, waits.timeout)
    peers, memory = dict[int, socket.socket](), dict[int, MappedMemory]()
    descriptor = shared = None
    with ExitStack() as stack, ExitStack() as connections:
        listener, address = _listen(stack)
        secret = secrets.token_bytes(16)
        greetings = exchange((address, secret))
        with suppress(OSError):  # also if ranks only seem to be on one host
            descriptor = anonymous_memory(MappedMemory.size(ranks))
            stack.callback(os.close, descriptor)
            for number, member in enumerate(members[:me]):  # an answer is not awaited
                peers[number] = connections.enter_context(_call(me, greetings[member], descriptor, seconds))
        can_meet = listener is not None and descriptor is not None and len(peers) == me
        all_can = all(exchange(can_meet))  # else ranks that are not called would wait
        if listener is not None and descriptor is not None and all_can:
            with suppress(OSError):
                while len(peers) < ranks - 1:
                    number, peers[number], memory[number] = _answer(listener, secret, descriptor, ranks, seconds)
                    connections.enter_context(peers[number])
                for number in range(me):
                    memory[number] = _received(peers[number], 1, ranks)[1]
                memory[me] = MappedMemory(os.dup(descriptor), ranks)
                for peer in peers.values():
                    peer.settimeout(waits.timeout)
                named = replace(waits, names=[waits.name(member) for member in members])
                shared = SharedMemory(me, peers, [memory[number] for number in range(ranks)], named)
                connections.pop_all()  # which the shared memory closes
        everywhere = all(exchange(shared is not None))
        return shared if everywhere and len(members) > 1 else None


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


def _call(me: int, greeting: tuple[str | None, bytes], descriptor: int, seconds: float) -> socket.socket:
    address, secret = greeting
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
