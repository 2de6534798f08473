"""Authenticated connections between processes, directly and not through the process group. Nothing is pickled."""

from __future__ import annotations

import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import torch

from ..errors import CollectiveError
from ..ir import memory_of
from ..runtime import host_identity, keep_alive, own_addresses

_SECONDS = 60.0  # to connect
_BAD_LINK = (OSError, EOFError, AuthenticationError, ValueError)


class Link:
    """Connection to one rank. One thread reads and one thread writes, so that no rank waits for another rank."""

    def __init__(
        self, connection: Connection, take: Callable[[dict[str, Any], list[bytearray]], None], lost: Callable[[], None]
    ) -> None:
        self._connection, self._take, self._lost = connection, take, lost
        self._out = queue.SimpleQueue[tuple[bytes, Sequence[torch.Tensor]] | None]()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, daemon=True).start()

    def send(self, header: dict[str, Any], tensors: Sequence[torch.Tensor]) -> None:
        sizes = [x.numel() * x.element_size() for x in tensors]
        self._out.put((json.dumps({**header, "sizes": sizes}).encode(), tensors))

    def close(self, seconds: float) -> None:
        self._out.put(None)
        self._writer.join(seconds)
        with suppress(OSError), socket.socket(fileno=self._connection.fileno()) as link:
            try:
                link.shutdown(socket.SHUT_RDWR)  # which ends the reading thread
            finally:
                link.detach()

    def _write(self) -> None:
        with suppress(OSError):  # the reading thread reports it
            while (message := self._out.get()) is not None:
                header, tensors = message
                self._connection.send_bytes(header)
                for x in tensors:
                    self._connection.send_bytes(memory_of(x))

    def _read(self) -> None:
        with suppress(*_BAD_LINK), self._connection:
            while True:
                header = json.loads(self._connection.recv_bytes())
                tensors = [bytearray(size) for size in header["sizes"]]
                for each in tensors:
                    self._connection.recv_bytes_into(each)
                self._take(header, tensors)
        self._lost()


def connected(
    rank: int, linked: Callable[[int], Collection[int]], exchange: Callable[[Any, str], list[Any]]
) -> dict[int, Connection]:
    both: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    with socket.create_server(("", 0), backlog=4096, **both) as listener:
        listener.settimeout(0.1)
        mine = (own_addresses(), listener.getsockname()[1], host_identity(), secrets.token_bytes(16))
        known = exchange(mine, "to connect for asynchronous training")
        links = {other: _reached(rank, other, known) for other in linked(rank) if other < rank}
        arrived, end = queue.SimpleQueue[tuple[int, Connection]](), time.monotonic() + _SECONDS
        while missing := {other for other in linked(rank) if other > rank} - links.keys():
            if time.monotonic() > end:
                raise CollectiveError(f"rank {rank}: ranks {sorted(missing)} did not connect in {_SECONDS:g} s")
            with suppress(TimeoutError, socket.timeout):  # one class since Python 3.10
                link, _ = listener.accept()
                threading.Thread(target=_greet, args=(link, known[rank][3], arrived), daemon=True).start()
            while not arrived.empty():
                other, connection = arrived.get()
                links[other] = connection
        return links


def _reached(rank: int, other: int, known: list[Any]) -> Connection:
    addresses, port, host, secret = known[other]
    here = ["127.0.0.1"] if host == known[rank][2] else []
    for address in [*here, *addresses]:
        with suppress(*_BAD_LINK):
            connection = _connection(socket.create_connection((address, port), timeout=_SECONDS / 4))
            if connection.poll(_SECONDS):  # the other end may first wait for ranks before it
                answer_challenge(connection, secret)
                deliver_challenge(connection, secret)
                connection.send_bytes(str(rank).encode())
                return connection
    raise CollectiveError(f"rank {rank} cannot connect to rank {other} at {', '.join(addresses)}, port {port}")


def _greet(link: socket.socket, secret: bytes, arrived: queue.SimpleQueue[tuple[int, Connection]]) -> None:
    """Pass on a connection with the rank at the other end. A stranger's is closed, or waits in this thread."""
    connection = _connection(link)
    try:
        deliver_challenge(connection, secret)
        answer_challenge(connection, secret)
        arrived.put((int(connection.recv_bytes(8)), connection))
    except _BAD_LINK:
        connection.close()


def _connection(link: socket.socket) -> Connection:
    keep_alive(link)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a small message waits for an acknowledgement
    link.settimeout(None)
    return Connection(link.detach())
