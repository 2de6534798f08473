"""Torch functions that a forward trace records as something else: attention as one op, dropout as a keyed draw.

The replacement must be written where the function still has its name, above the dispatcher, which by then has picked a
kernel for one device. Modules enter theirs with `intercept`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from .. import _torch

__all__ = ["ForwardFunctions", "intercept"]

_replacements: dict[Any, Callable[..., Any]] = {}


def intercept(function: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a replacement for a torch function in forward traces."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        _replacements[function] = replacement
        return replacement

    return register


class ForwardFunctions(TorchFunctionMode):
    """Active while a forward is traced; inside a torch.func derivative the function itself runs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = _replacements.get(func)
        if replacement is not None and not _torch.differentiating_level():
            return replacement(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
