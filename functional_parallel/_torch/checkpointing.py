"""Support for `torch.utils.checkpoint` inside a traced model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.utils.checkpoint

from .threads import of_thread, pushed

__all__ = ["checkpointing"]


P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def checkpointing(region: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` call its function directly, inside `region(name)`."""
    # Its two implementations, an autograd.Function and hooks on saved tensors, do not work under torch.func. Models
    # hold references to `checkpoint`, so the two names that it looks up at each call are replaced. They stay replaced
    # for all threads while some thread is inside. Threads outside still use torch's implementations.
    _checkpoints.enter()
    try:
        with pushed(_regions(), region):
            yield
    finally:
        _checkpoints.leave()


def _regions() -> list[Callable[[str], AbstractContextManager[None]]]:
    return of_thread("checkpointing", list)


class _Checkpoints:
    """Replacement of the two names, with a count of the active contexts."""

    def __init__(self) -> None:
        self._torchs: tuple[Any, Any] = (None, None)
        self._lock, self._inside = threading.Lock(), 0

    def enter(self) -> None:
        module = torch.utils.checkpoint
        with self._lock:
            if not self._inside:
                self._torchs = module.CheckpointFunction, getattr(module, _GENERATOR)
                self._put(self, self.generator)
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._put(*self._torchs)

    def apply(self, function: Callable[P, R], preserve: bool, *args: P.args, **kwargs: P.kwargs) -> R:
        regions = _regions()
        if not regions:
            result: R = self._torchs[0].apply(function, preserve, *args, **kwargs)
            return result
        with regions[-1]("checkpoint"):
            return function(*args, **kwargs)

    def generator(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
        regions = _regions()
        if not regions:
            yield from self._torchs[1](function, *args, **kwargs)
            return
        with regions[-1]("checkpoint"):
            yield

    def _put(self, function: Any, generator: Callable[..., Iterator[None]]) -> None:
        torch.utils.checkpoint.CheckpointFunction = function  # type: ignore[misc]
        setattr(torch.utils.checkpoint, _GENERATOR, generator)


_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl"):  # torch 2.14 keeps the other name for old callers
    _GENERATOR += "_impl"

_checkpoints = _Checkpoints()
