"""JSON messages over a stream socket, one per line."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any

_MOST = 1 << 20  # bytes of one message
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3}  # a lost host is noticed within 22 s


class WatchLine:
    def __init__(self, peer: socket.socket) -> None:
        self.peer, self._unread = peer, b""
        peer.settimeout(5.0)
        keep_alive(peer)

    def fileno(self) -> int:
        return self.peer.fileno()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. If the peer has gone, do nothing: reading from this end reports it."""
        with suppress(OSError):
            self.peer.sendall(json.dumps(message).encode() + b"\n")

    def read(self) -> list[dict[str, Any]]:
        try:
            data = self.peer.recv(1 << 16)
        except TimeoutError:
            return []
        except OSError:
            data = b""
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except ValueError as error:
            raise ConnectionError(str(error)) from error
        if not found and (not data or len(self._unread) > _MOST):
            raise ConnectionError("the connection was closed")
        return found

    def close(self) -> None:
        self.peer.close()


def keep_alive(peer: socket.socket) -> None:
    with suppress(OSError):
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
