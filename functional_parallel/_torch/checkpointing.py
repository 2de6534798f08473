"""Support for `torch.utils.checkpoint` inside a traced model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import ParamSpec, TypeVar

import torch.utils.checkpoint

from .threads import Replacement, of_thread, pushed

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def checkpointing(region: Callable[[str], AbstractContextManager[None]]) -> Iterator[None]:
    """Make `torch.utils.checkpoint.checkpoint` call its function directly, inside `region(name)`."""
    # Its two implementations, an autograd.Function and hooks on saved tensors, do not work under torch.func. Models
    # hold references to `checkpoint`, so the two names that it reads at each call are replaced. Threads outside
    # still use torch's implementations.
    with _replacement.active(), pushed(_regions(), region):
        yield


def _regions() -> list[Callable[[str], AbstractContextManager[None]]]:
    return of_thread("checkpointing", list)


class _CheckpointFunction:
    @staticmethod
    def apply(function: Callable[P, R], preserve: bool, *args: P.args, **kwargs: P.kwargs) -> R:
        regions = _regions()
        if not regions:
            result: R = _replacement.originals[0].apply(function, preserve, *args, **kwargs)
            return result
        with regions[-1]("checkpoint"):
            return function(*args, **kwargs)


def _generator(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Iterator[None]:
    regions = _regions()
    if not regions:
        yield from _replacement.originals[1](function, *args, **kwargs)
        return
    with regions[-1]("checkpoint"):
        yield


_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl"):  # torch 2.14 keeps the other name for old callers
    _GENERATOR += "_impl"

_replacement = Replacement(
    (torch.utils.checkpoint, "CheckpointFunction", _CheckpointFunction),
    (torch.utils.checkpoint, _GENERATOR, _generator),
)
