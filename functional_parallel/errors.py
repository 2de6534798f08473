"""What a trace refuses."""

from __future__ import annotations

__all__ = ["CustomFunctionError", "MemoryLayoutError", "MutationError", "TracingError"]


class TracingError(ValueError):
    """The function cannot be traced: it needs values, or does what a pure function must not."""


class MutationError(TracingError):
    """An in-place op whose effect would be lost, or is not known."""


class CustomFunctionError(TracingError):
    """A user's autograd.Function inside a function whose backward is derived from its traced forward."""


class MemoryLayoutError(TracingError):
    """An op whose result depends on strides or memory that a program does not share with eager torch."""
