"""Connect the processes of a run to each other, directly, and not through the process group."""

from __future__ import annotations

import hmac
import secrets
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from ..errors import CollectiveError
from ..runtime import host_identity, own_addresses

__all__ = ["connected"]

_SECONDS = 60.0
_SECRET = 32  # characters


def connected(
    rank: int, linked: Callable[[int], Collection[int]], exchange: Callable[[Any, str], list[Any]]
) -> dict[int, socket.socket]:
    """Return a connection to each rank in `linked(rank)`. All ranks call this: `exchange` is a collective over them."""
    both: dict[str, Any] = {"family": socket.AF_INET6, "dualstack_ipv6": True} if socket.has_dualstack_ipv6() else {}
    with socket.create_server(("", 0), backlog=4096, **both) as listener:
        listener.settimeout(_SECONDS)
        mine = (own_addresses(), listener.getsockname()[1], host_identity(), secrets.token_hex(_SECRET // 2))
        known = exchange(mine, "to connect for asynchronous training")
        links = {other: _reached(rank, other, known) for other in linked(rank) if other < rank}
        missing = {other for other in linked(rank) if other > rank}
        while missing:
            try:
                link, _ = listener.accept()
                other = _greeted(link, known[rank][3])
            except OSError as error:
                raise CollectiveError(f"rank {rank}: ranks {sorted(missing)} did not connect: {error}") from error
            if other in missing:
                links[other] = link
                missing.discard(other)
        return links


def _reached(rank: int, other: int, known: list[Any]) -> socket.socket:
    addresses, port, host, secret = known[other]
    here = ["127.0.0.1"] if host == known[rank][2] else []
    for address in [*here, *addresses]:
        with suppress(OSError):
            link = socket.create_connection((address, port), timeout=_SECONDS / 4)
            link.sendall(f"{secret}{rank:08d}".encode())
            return link
    raise CollectiveError(f"rank {rank} cannot connect to rank {other} at {', '.join(addresses)}, port {port}")


def _greeted(link: socket.socket, secret: str) -> int:
    """Return the rank at the other end; -1 for a stranger."""
    link.settimeout(_SECONDS / 4)
    hello = b""
    while len(hello) < _SECRET + 8 and (data := link.recv(_SECRET + 8 - len(hello))):
        hello += data
    if len(hello) < _SECRET + 8 or not hmac.compare_digest(hello[:_SECRET], secret.encode()):
        link.close()
        return -1
    return int(hello[_SECRET:])
