"""What a user switches on around a call, and changes by it what torch's ops do: autocast, inference mode, anomalies.

A program is what was traced under autocast, its casts among its ops, and another one without. It runs without any of
these: autocast would cast operands once more, and what is made in inference mode cannot be written into afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

__all__ = ["autocast_dtypes", "disable_ambient_modes"]

_DEVICES = ("cpu", "cuda")
_NOTHING: AbstractContextManager[None] = nullcontext()


def autocast_dtypes() -> tuple[torch.dtype | None, ...]:
    """To which type each kind of device casts now; None for those that do not.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     autocasts()
    (torch.bfloat16, None)
    """
    return tuple(torch.get_autocast_dtype(each) if torch.is_autocast_enabled(each) else None for each in _DEVICES)


def disable_ambient_modes() -> AbstractContextManager[None]:
    """Run a program inside: its ops do what they say."""
    if torch.is_inference_mode_enabled() or any(map(torch.is_autocast_enabled, _DEVICES)):
        return _switched_off()
    return _NOTHING


@contextmanager
def _switched_off() -> Iterator[None]:
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield
