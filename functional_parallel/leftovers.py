"""What making a program leaves in memory and nobody asks for again, given back.

A rank makes its programs once and then trains for days, so what tracing leaves behind is held for days, on every rank.
Most of it is caches of text and of shapes, which come back by themselves when they are needed.
"""

from __future__ import annotations

import ctypes
import gc
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from . import _torch
from .source import is_library

__all__ = ["forget_library_lines", "give_back_pages", "leaving_nothing"]


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """Make a program inside; afterwards its caches are as they were, and free memory is the system's again."""
    forget_library_lines()
    try:
        with _collected(), _torch.forgetting_shapes():
            yield
    finally:
        forget_library_lines()
        give_back_pages()


@contextmanager
def _collected() -> Iterator[None]:
    """Collect what became garbage inside, and look at nothing older for it.

    Graphs are cycles, which Python would come to when the process has grown by a quarter: in training, never. To walk
    through all that torch holds would take longer than the trace.
    """
    is_outermost = not gc.get_freeze_count()  # and nobody else froze what is his
    if is_outermost:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if is_outermost:
            gc.unfreeze()


def forget_library_lines() -> None:
    """Drop the lines of torch's and our own files from `linecache`, which reads a file again when it is asked.

    Importing torch leaves some 4 MiB of them, read to say where an op was registered, and every fake mode reads the
    files on its stack. Lines that are in no file (a notebook's cells), and those of the user's files, stay.
    """
    for file, entry in list(linecache.cache.items()):
        if len(entry) > 1 and entry[1] is not None and is_library(file):  # a size, a time, the lines, the full name
            linecache.cache.pop(file, None)


def give_back_pages() -> None:
    """Let glibc return its free pages to the system, which by itself it does only at the end of its heap.

    A trace makes and drops thousands of small things between others that stay, and so leaves holes of some megabytes;
    elsewhere than in glibc there is nothing to call.
    """
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
