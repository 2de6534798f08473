"""Connections of asynchronous ranks: strangers are refused, messages arrive whole, a closed connection is told."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest
import torch

from functional_parallel.asynchronous import links
from functional_parallel.asynchronous.links import Link, connected
from functional_parallel.errors import CollectiveError

SIZES = [0, 1, 5, 1 << 20]


class Exchange:
    """A collective of threads; strangers call the listeners before the ranks do."""

    def __init__(self, ranks: int, call: Any = lambda port: None) -> None:
        self._values: list[Any] = [None] * ranks
        self._barrier, self._call = threading.Barrier(ranks), call

    def of(self, rank: int) -> Any:
        def exchange(value: Any, purpose: str) -> list[Any]:
            self._values[rank] = value
            self._call(value[1])
            self._barrier.wait(10)
            return self._values

        return exchange


def all_connected(ranks: int, exchange: Exchange) -> list[dict[int, Connection]]:
    with ThreadPoolExecutor(ranks) as pool:
        others = lambda rank: set(range(ranks)) - {rank}  # noqa: E731
        return list(pool.map(lambda rank: connected(rank, others, exchange.of(rank)), range(ranks)))


def test_strangers_are_refused_and_delay_nobody() -> None:
    strangers: list[Any] = []

    def call(port: int) -> None:
        silent, rude = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
        rude.sendall(b"\x00\x00\x00\x04abcd")
        strangers.extend([silent, rude])

        def guess() -> None:
            with pytest.raises((AuthenticationError, EOFError, OSError)):
                Client(("127.0.0.1", port), authkey=b"a guess")

        threading.Thread(target=guess, daemon=True).start()

    found = all_connected(3, Exchange(3, call))
    assert [set(each) for each in found] == [{1, 2}, {0, 2}, {0, 1}]
    for rank, own in enumerate(found):
        for other, connection in own.items():
            connection.send_bytes(f"{rank} to {other}".encode())
    for rank, own in enumerate(found):
        for other, connection in own.items():
            assert connection.recv_bytes() == f"{other} to {rank}".encode()
            connection.close()
    for each in strangers:
        each.close()


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_SECONDS", 0.2)
    exchange = lambda value, purpose: [value, value]  # noqa: E731
    with pytest.raises(CollectiveError, match=r"rank 0: ranks \[1\] did not connect in 0.2 s"):
        connected(0, lambda rank: {1}, exchange)


@contextmanager
def pair() -> Iterator[tuple[Any, Any]]:
    """Two links, each with the queue of what arrives; None at the end."""
    made = []
    for connection in (found.popitem()[1] for found in all_connected(2, Exchange(2))):
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        taken = lambda header, tensors, inbox=inbox: inbox.put((header, tensors))  # noqa: E731
        made.append((Link(connection, taken, lambda inbox=inbox: inbox.put(None)), inbox))
    yield tuple(made)
    for link, _ in made:
        link.close(5.0)


def test_messages_arrive_whole_and_in_order_also_if_nobody_reads_first() -> None:
    """Each sends much more than a connection holds before it takes anything."""
    with pair() as ends:
        for number in range(8):
            for link, _ in ends:
                link.send({"number": number}, [torch.full((size,), number, dtype=torch.int32) for size in SIZES])
        for _, inbox in ends:
            for number in range(8):
                header, tensors = inbox.get(timeout=30)
                assert header == {"number": number, "sizes": [4 * size for size in SIZES]}
                wanted = [torch.full((size,), number, dtype=torch.int32).numpy().tobytes() for size in SIZES]
                assert [bytes(each) for each in tensors] == wanted


def test_what_was_sent_before_the_end_arrives_and_then_the_end() -> None:
    with pair() as ((link, _), (_, inbox)):
        link.send({"last": True}, [torch.ones(1 << 20)])
        link.close(5.0)
        assert inbox.get(timeout=30)[0]["last"]
        assert inbox.get(timeout=30) is None
