"""Moves between memories in flight: one worker per link copies while the rank computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from ...ops import TO_MEMORY, copy_into, room_for
from ...program import MemoryMove

Link = tuple[str, str]
_WORKERS: dict[tuple[int, Link], ThreadPoolExecutor] = {}  # by process: a child that was forked has no threads
_OWN = threading.local()  # the stream of a worker


class PendingMove:
    __slots__ = ("_copied",)

    def __init__(self, copied: Future[Tensor]) -> None:
        self._copied = copied

    def wait(self) -> Tensor:
        return self._copied.result()


def start_of(move: MemoryMove) -> Callable[..., PendingMove]:
    """Return the function that starts a move. It takes the tensors of the op's arguments."""
    link, node = (move.source, move.target), move.node
    if node.target is TO_MEMORY:
        memory, device = node.args[1], node.kwargs["device"]
        return lambda x: _started(link, room_for(x, memory, device=device), x)
    return partial(_started, link)


def _started(link: Link, target: Tensor, x: Tensor) -> PendingMove:
    worker = _WORKERS.get((os.getpid(), link))
    if worker is None:
        worker = _WORKERS[os.getpid(), link] = ThreadPoolExecutor(1, f"functional_parallel {' to '.join(link)}")
    device = next((each.device for each in (target, x) if each.device.type == "cuda"), None)
    ready = None if device is None else torch.cuda.current_stream(device).record_event()
    return PendingMove(worker.submit(_copied, target, x, ready))


def _copied(target: Tensor, x: Tensor, ready: torch.cuda.Event | None) -> Tensor:
    with torch.no_grad():
        if ready is None:
            return copy_into(target, x)
        if not hasattr(_OWN, "stream"):
            _OWN.stream = torch.cuda.Stream(ready.device)
        with torch.cuda.stream(_OWN.stream):  # the rank's own stream goes on
            ready.wait()
            copy_into(target, x)
            torch.cuda.current_stream().synchronize()
    return target
