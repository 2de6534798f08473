"""Modes that a user enters around a call and that change the behaviour of torch's ops: autocast, no_grad, inference.

A function has one program per state of autocast; the casts are ops of the program. A program runs without these modes.
Autocast would cast operands a second time, and tensors created in inference mode cannot be modified afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from .. import _torch

_DEVICES = ("cpu", "cuda")
_NOTHING: AbstractContextManager[None] = nullcontext()


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """Return the autocast dtype of each device type; None where autocast is off.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocast_dtypes()
    (torch.bfloat16, None)
    """
    return tuple(torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None for each in _DEVICES)


def disable_ambient_modes() -> AbstractContextManager[None]:
    """Return a context without inference mode and autocast, so that ops behave as recorded."""
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _DEVICES)):
        return _switched_off()
    return _NOTHING


@contextmanager
def _switched_off() -> Iterator[None]:
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def gradients_wanted(are_wanted: bool) -> Iterator[None]:
    """Context of a trace that may be differentiated, or will not be, as under `torch.no_grad()`."""
    with _torch.pushed(_wanted(), are_wanted):
        yield


def in_trace_without_gradient() -> bool:
    """Whether the current trace will not be differentiated. Other traces may be."""
    return bool(_wanted()) and not _wanted()[-1]


def no_gradient_is_wanted() -> bool:
    """Whether the current trace will not be differentiated; outside a trace, whether gradients are off."""
    return not _wanted()[-1] if _wanted() else not torch.is_grad_enabled()


def _wanted() -> list[bool]:
    return _torch.of_thread("wanted gradients", list[bool])
