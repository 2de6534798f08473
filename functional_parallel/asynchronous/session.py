"""One process's part in an asynchronous run, and the thread that serves the other ranks, waiting for none of them."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import optree
import torch

from ..errors import CollectiveError
from ..functions import PyTree
from .links import Link
from .protocol import TO_CLIENT, Message, Node


class Session:
    def __init__(
        self,
        rank: int,
        links: Mapping[int, Connection],
        node: Node | None,  # what this rank holds for the others
        templates: Mapping[str, PyTree],
        name: Callable[[int], str],
        server: int | None,  # the rank whose death ends the run
        timeout: float,  # seconds that the training loop waits for a reply
    ) -> None:
        self._timeout = timeout
        self.rank, self._node, self._templates, self._name, self._server = rank, node, templates, name, server
        self._events = queue.SimpleQueue[Callable[[], None] | None]()  # for the thread; None ends it
        self._replies = queue.SimpleQueue[Message | BaseException]()
        self._begun, self.ended = time.monotonic(), dict[int, str]()
        self.latest: Any = None
        self._links = {each: self._linked(each, link) for each, link in links.items()}
        self._thread = threading.Thread(target=self._run, name="functional_parallel asynchronous", daemon=True)
        self._thread.start()

    def _linked(self, rank: int, connection: Connection) -> Link:
        def take(header: dict[str, Any], tensors: list[bytearray]) -> None:
            self._events.put(lambda: self._deliver([self._decoded(header, tensors)]))

        return Link(connection, take, lambda: self._events.put(partial(self._lost, rank)))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def exchange(self, message: Message) -> Message:
        began = time.monotonic()
        self._events.put(partial(self._deliver, [message]))
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
        self._events.put(None)
        self._thread.join(10.0)

    def _run(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                event()
        except BaseException as error:
            self._replies.put(error)
        end = time.monotonic() + 10.0
        for link in self._links.values():
            link.close(max(0.0, end - time.monotonic()))

    def _lost(self, rank: int) -> None:
        del self._links[rank]
        if self._node is not None and self._node.ended.get(rank) == "left":
            return
        if rank == self._server:
            self._replies.put(
                CollectiveError(
                    f"{self._name(self.rank)}: {self._name(rank)}, the parameter server, died, and the weights "
                    "with it: begin again from what was saved. With fp.asynchronous.rotating_server every rank has "
                    "weights, and the others go on"
                )
            )
            return
        told = f"functional_parallel: {self._name(rank)} died; the others go on without it"
        print(told, file=sys.stderr, flush=True)
        self._deliver([Message("gone", rank, self.rank)])

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
        if message.target not in self._links:
            return  # it died; the node was told
        described, tensors = encoded(message.tree)
        header = {"kind": message.kind, "source": message.source, "numbers": message.numbers, "tensors": described}
        self._links[message.target].send(header, tensors)

    def _decoded(self, header: dict[str, Any], tensors: list[bytearray]) -> Message:
        tree = decoded(header["tensors"], tensors, self._templates.get(header["kind"]))
        return Message(header["kind"], header["source"], self.rank, tree, header["numbers"])


# --- Trees of tensors as bytes. Both ends know the structure of the tree, so only tensors are sent ---


def encoded(tree: PyTree) -> tuple[list[Any] | None, list[torch.Tensor]]:
    if tree is None:
        return None, []
    tensors = [leaf.detach().cpu().contiguous() for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors], tensors


def decoded(described: Sequence[Any] | None, tensors: Sequence[bytearray], template: PyTree) -> PyTree:
    if described is None:
        return None
    leaves, tree = optree.tree_flatten(template)
    given = iter(zip(described, tensors, strict=True))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            (name, shape), body = next(given)
            dtype = getattr(torch, name)
            x = torch.frombuffer(body, dtype=dtype) if body else torch.empty(0, dtype=dtype, device="cpu")
            leaves[index] = x.reshape(shape).to(leaf.device)
    return optree.tree_unflatten(tree, leaves)
