"""Connections of one process to the ranks that it exchanges messages with, and the thread that serves them.

The thread holds this rank's node. It never waits for one peer: what cannot be sent at once is kept. A connection that
closes is the death of its rank.
"""

from __future__ import annotations

import hmac
import json
import queue
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import optree
import torch

from ..errors import CollectiveError
from ..functions import PyTree
from ..ir import memory_of
from ..runtime import host_identity, keep_alive, own_addresses
from .messages import TO_CLIENT, Message, Node

_FRAME = struct.Struct("!QQ")  # bytes of the header, and of the tensors
_READ = 1 << 20
_SECONDS = 60.0  # to connect
_SECRET = 32  # characters
_ALIGNED = 16  # bytes, as the widest dtype
_PADDING = memoryview(bytes(_ALIGNED))


class _Peer:
    """Connection to one rank."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.rank, self.link = rank, link
        keep_alive(link)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else a small frame waits for an acknowledgement
        link.setblocking(False)
        self.out: deque[tuple[memoryview, Any]] = deque()  # what to send, and what has to live until then
        self._unread = bytearray()

    def send(self, header: bytes, parts: list[memoryview], kept: Any) -> None:
        sizes = _FRAME.pack(len(header), sum(part.nbytes for part in parts))
        self.out.extend((part, kept) for part in (memoryview(sizes), memoryview(header), *parts))

    def write(self) -> None:
        with suppress(BlockingIOError):
            while self.out:
                part, kept = self.out[0]
                sent = self.link.send(part) if part.nbytes else 0
                if sent < part.nbytes:
                    self.out[0] = (part[sent:], kept)
                    return
                self.out.popleft()

    def read(self) -> list[tuple[bytes, bytearray]]:
        with suppress(BlockingIOError):
            data = self.link.recv(_READ)
            if not data:
                raise ConnectionResetError("the connection was closed")
            self._unread += data
        found = []
        while len(self._unread) >= _FRAME.size:
            head, body = _FRAME.unpack_from(self._unread)
            end = _FRAME.size + head + body
            if len(self._unread) < end:
                break
            middle = _FRAME.size + head
            found.append((bytes(self._unread[_FRAME.size : middle]), self._unread[middle:end]))
            del self._unread[:end]
        return found


class Session:
    """A rank's part in a run. `templates` has, by kind of message, a tree like the one that it carries."""

    def __init__(
        self,
        rank: int,
        links: Mapping[int, socket.socket],
        node: Node | None,  # what this rank holds for the others
        templates: Mapping[str, PyTree],
        name: Callable[[int], str],
        server: int | None,  # the rank whose death ends the run
        timeout: float,  # seconds that the training loop waits for a reply
    ) -> None:
        self._timeout = timeout
        self.rank, self._node, self._templates, self._name, self._server = rank, node, templates, name, server
        self._peers = {each: _Peer(each, link) for each, link in links.items()}
        self._posted, self._replies = queue.SimpleQueue[Message | None](), queue.SimpleQueue[Message | BaseException]()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._begun, self.ended, self.is_over = time.monotonic(), dict[int, str](), False
        self.latest: Any = None
        self._thread = threading.Thread(target=self._run, name="functional_parallel asynchronous", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def exchange(self, message: Message) -> Message:
        """Send a message of the training loop, and wait for the reply."""
        began = time.monotonic()
        self._post(message)
        while True:
            with suppress(queue.Empty):
                found = self._replies.get(timeout=1.0)
                if isinstance(found, BaseException):
                    self._replies.put(found)  # for later calls
                    raise found
                return found
            if time.monotonic() - began > self._timeout:
                other = "the other ranks" if self._server in (None, self.rank) else self._name(self._server)
                raise CollectiveError(
                    f"{self._name(self.rank)}: the timeout of the process group, {self._timeout:g} s, passed before "
                    f"{other} replied. A rank that is stopped, or much slower than the bound on staleness allows, "
                    "delays the others"
                )
            if not self._thread.is_alive():
                raise CollectiveError(f"{self._name(self.rank)}: the connections to the other ranks are closed")

    def close(self) -> None:
        """End the connections, once every rank has the final weights."""
        self._post(None)
        self._thread.join(10.0)

    def _post(self, message: Message | None) -> None:
        self._posted.put(message)
        with suppress(OSError):
            self._waker.send(b"!")

    def _run(self) -> None:
        try:
            while not self.is_over or any(peer.out for peer in self._peers.values()):
                self._turn()
        except BaseException as error:
            self._replies.put(error)
        for link in (*(peer.link for peer in self._peers.values()), self._woken, self._waker):
            link.close()

    def _turn(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for peer in self._peers.values():
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.out else 0)
                selector.register(peer.link, events, peer)
            ready = [(key.data, events) for key, events in selector.select()]
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        for peer, events in ready:
            if peer is not None:
                self._serve(peer, events)
        while not self._posted.empty():
            message = self._posted.get()
            if message is None:
                self.is_over = True
            else:
                self._deliver([message])

    def _serve(self, peer: _Peer, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                peer.write()
            found = peer.read() if events & selectors.EVENT_READ else []
        except OSError:
            self._lost(peer)
            return
        for header, body in found:
            self._deliver([self._decoded(peer.rank, header, body)])

    def _lost(self, peer: _Peer) -> None:
        peer.link.close()
        del self._peers[peer.rank]
        if self.is_over or (self._node is not None and self._node.ended.get(peer.rank) == "left"):
            return
        if peer.rank == self._server:
            self._replies.put(
                CollectiveError(
                    f"{self._name(self.rank)}: {self._name(peer.rank)}, the parameter server, died, and the weights "
                    "with it: begin again from what was saved. With fp.asynchronous.rotating_server every rank has "
                    "weights, and the others go on"
                )
            )
            return
        told = f"functional_parallel: {self._name(peer.rank)} died; the others go on without it"
        print(told, file=sys.stderr, flush=True)
        self._deliver([Message("gone", peer.rank, self.rank)])

    def _deliver(self, messages: list[Message]) -> None:
        while messages:
            message = messages.pop(0)
            if message.target != self.rank:
                self._send(message)
            elif message.kind in TO_CLIENT:
                self.ended.update(message.numbers["ended"])
                self._replies.put(message)
            elif self._node is not None:
                self._node, more = self._node.handle(message)
                messages += more

    def _send(self, message: Message) -> None:
        peer = self._peers.get(message.target)
        if peer is None:
            return  # it died; the node was told
        parts, described, kept = encoded(message.tree)
        header = {"kind": message.kind, "source": message.source, "numbers": message.numbers, "tensors": described}
        peer.send(json.dumps(header).encode(), parts, kept)
        with suppress(OSError):  # reading reports it
            peer.write()

    def _decoded(self, rank: int, header: bytes, body: bytearray) -> Message:
        found = json.loads(header)
        tree = decoded(found["tensors"], body, self._templates.get(found["kind"]))
        return Message(found["kind"], found["source"], self.rank, tree, found["numbers"])


# --- Connections between processes, directly, and not through the process group ---


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


# --- Trees of tensors as bytes. Both ends know the structure of the tree, so only tensors are sent ---


def encoded(tree: PyTree) -> tuple[list[memoryview], list[Any] | None, Any]:
    """Return the bytes of the tensors, their dtypes and shapes, and what has to live until they are sent."""
    if tree is None:
        return [], None, None
    tensors = [leaf.detach().cpu().contiguous() for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    parts = []
    for x in tensors:
        if x.numel():
            parts.append(memory_of(x))
            parts.append(_PADDING[: -len(parts[-1]) % _ALIGNED])
    return parts, [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors], tensors


def decoded(described: Sequence[Any] | None, body: bytearray, template: PyTree) -> PyTree:
    """Return a tree like the template with the tensors of a message, on the template's devices."""
    if described is None:
        return None
    leaves, tree = optree.tree_flatten(template)
    given, offset = iter(described), 0
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        name, shape = next(given)
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        if size:
            x = torch.frombuffer(body, dtype=dtype, count=size // dtype.itemsize, offset=offset).reshape(shape)
        else:
            x = torch.empty(shape, dtype=dtype, device="cpu")
        leaves[index] = x.to(leaf.device)
        offset += size + -size % _ALIGNED
    return optree.tree_unflatten(tree, leaves)
