"""Moves between memories in flight: one worker per link copies while the rank computes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from ...ops import TO_MEMORY, copy_into, room_for
from ...program import MemoryMove
from ..handles import PendingMove

Link = tuple[str, str]
_WORKERS: dict[tuple[int, Link], ThreadPoolExecutor] = {}  # by process: a child that was forked has no threads
_OWN = threading.local()  # the stream of a worker


def _end_moves() -> None:
    with suppress(RuntimeError):  # at the end of the process, which waits for the moves itself
        for worker in [worker for (process, _), worker in _WORKERS.items() if process == os.getpid()]:
            worker.submit(int).result()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_end_moves)  # a child has the values, but no workers


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
    return PendingMove(target, worker.submit(_copied, target, x, ready))


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
