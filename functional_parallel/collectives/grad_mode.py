"""Grad mode at the call of a primitive. Inside the primitive's autograd.Function torch has disabled gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["called_with_gradients", "called_without_gradients", "keeping_grad_mode"]

_at_call: ContextVar[bool | None] = ContextVar("gradients at the call", default=None)


@contextmanager
def keeping_grad_mode() -> Iterator[None]:
    """Record the grad mode around a Function's `apply`. Under torch.func, `apply` calls itself once per level."""
    token = _at_call.set(torch.is_grad_enabled()) if _at_call.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _at_call.reset(token)


def called_without_gradients() -> bool:
    """Whether a primitive is running that was called under `torch.no_grad()`."""
    return _at_call.get() is False


def called_with_gradients() -> bool:
    """Whether a primitive is running that was called with gradients enabled, so outside every autograd.Function."""
    return _at_call.get() is True
