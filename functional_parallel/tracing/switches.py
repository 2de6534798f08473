"""Modes that a user enters around a call and that change the behaviour of torch's ops: autocast, inference mode.

A function has one program per state of autocast; the casts are ops of the program. A program runs without these modes.
Autocast would cast operands a second time, and tensors created in inference mode cannot be modified afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

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
