"""Release memory that tracing leaves allocated and that is not used again.

A rank lowers its programs once and then trains for days. Without this, every rank would hold the leftovers of tracing
for days.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from .. import _torch

_MOST_SHAPES = 10_000  # 10 MB


@contextmanager
def traced_in() -> Iterator[None]:
    """Context where a function is traced. On exit, new garbage is collected and cached shapes are dropped."""
    # Graphs are reference cycles. Python would collect them only after the process has grown by a quarter, which never
    # happens in training. While collection is off, new objects stay in the youngest generation. On exit only that
    # generation is scanned, because a scan of all objects of torch would take longer than the trace. If the user
    # collects inside the context, the objects move to an older generation and are not collected here.
    is_on = gc.isenabled()
    gc.disable()
    try:
        with _torch.forgetting_shapes(_MOST_SHAPES):
            yield
    finally:
        if is_on:  # else an outer context collects, or the user has turned collection off
            gc.collect(0)
            gc.enable()
