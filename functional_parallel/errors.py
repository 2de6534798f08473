"""Errors of functions that cannot be traced."""

from __future__ import annotations

__all__ = ["CustomFunctionError", "MemoryLayoutError", "MutationError", "TracingError"]


class TracingError(ValueError):
    """Raised for a function that cannot be traced: it depends on values, or is not pure."""


class MutationError(TracingError):
    """Raised for an in-place op if its effect would be lost or is unknown."""


class CustomFunctionError(TracingError):
    """Raised for a user's autograd.Function inside a function. The backward is derived from the traced forward."""


class MemoryLayoutError(TracingError):
    """Raised for an op with a result that depends on strides or memory, which may differ between program and eager."""
