"""Torch functions that a trace records as something else: attention as one op, dropout as a keyed draw.

The replacement must be written where the function still has its name, above the dispatcher, which by then has picked a
kernel for one device. Modules enter theirs with `intercept`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .. import _torch

__all__ = ["Interception", "intercept"]

_in_forwards: dict[Any, Callable[..., Any]] = {}
_always: dict[Any, Callable[..., Any]] = {}


def intercept(function: Any, *, always: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a replacement for a torch function in forward traces; `always`: under derivatives too.

    One that is always asked may return NotImplemented, to leave a call to the others.
    """

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        (_always if always else _in_forwards)[function] = replacement
        return replacement

    return register


class Interception(TorchFunctionMode):
    """Active during a trace. What is replaced in forwards alone runs as it is inside a torch.func derivative."""

    def __init__(self, forward_only: bool) -> None:
        super().__init__()
        self.forward_only = forward_only

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _always:
            result = _always[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if self.forward_only and func in _in_forwards and not _torch.differentiating_level():
            return _in_forwards[func](*args, **kwargs)
        return func(*args, **kwargs)


@intercept(torch.Tensor.data.__get__, always=True)  # type: ignore[attr-defined]
def _data(x: torch.Tensor) -> torch.Tensor:
    """As a `detach` that the recording sees for what it is."""
    return x.detach()
