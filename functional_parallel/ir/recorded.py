"""Values that the host computes for kernels that are recorded once and launched many times.

A kernel keeps its arguments when it is recorded. An op with an argument that the host computes for each run therefore
puts it into a tensor, and fills the tensor before each launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Fill = Callable[[], bool]  # returns whether the host knows the value

_fills: ContextVar[list[Fill] | None] = ContextVar("fills", default=None)


@contextmanager
def recording(fills: list[Fill]) -> Iterator[None]:
    """Record kernels in this context. `fills` gets the functions to call before each launch."""
    token = _fills.set(fills)
    try:
        yield
    finally:
        _fills.reset(token)


def is_recording() -> bool:
    return _fills.get() is not None


def before_launches(fill: Fill) -> None:
    """Call a function before each launch of the kernels that are being recorded."""
    fills = _fills.get()
    assert fills is not None
    fills.append(fill)
