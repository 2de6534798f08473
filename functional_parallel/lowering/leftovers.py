"""Release memory that lowering a program leaves allocated and that is not used again.

A rank lowers its programs once and then trains for days. Without this, every rank would hold the leftovers of tracing
for days. Most of them are caches of text and of shapes, which are rebuilt automatically when they are needed.
"""

from __future__ import annotations

import ctypes
import gc
import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import _torch
from ..ir import is_library

__all__ = ["forget_library_lines", "give_back_pages", "keep_pages", "release_trace_memory", "traced_in"]

_MOST_LINES = 1_000  # 0.1 MB; reading ten times this number takes a millisecond
_MOST_SHAPES = 10_000  # 10 MB
_MOST_TAKEN_FOR_ORDINARY = 32 << 20  # bytes; glibc's DEFAULT_MMAP_THRESHOLD_MAX


@contextmanager
def release_trace_memory() -> Iterator[None]:
    """Context in which a program is lowered. On exit, caches are trimmed and free memory returns to the system."""
    forget_library_lines()
    try:
        with traced_in():
            yield
    finally:
        forget_library_lines()
        give_back_pages()
        keep_pages()


@contextmanager
def traced_in() -> Iterator[None]:
    """Context in which a function is traced. On exit, new garbage is collected and cached shapes are dropped."""
    with _collected(), _torch.forgetting_shapes(_MOST_SHAPES):
        yield


@contextmanager
def _collected() -> Iterator[None]:
    """Collect the garbage that was created inside the context, without scanning older objects.

    Graphs are reference cycles. Python would collect them only after the process has grown by a quarter, which never
    happens in training. While collection is off, new objects stay in the youngest generation. On exit only that
    generation is scanned, because a scan of all objects of torch would take longer than the trace. If the user
    collects inside the context, the objects move to an older generation and are not collected here.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:  # else an outer context collects, or the user has turned collection off
            gc.collect(0)
            gc.enable()


def forget_library_lines() -> None:
    """Drop the lines of files of torch and this library from `linecache`, which rereads a file on demand.

    Importing torch leaves about 4 MiB of lines, read to report where an op was registered. Every fake mode also reads
    the files on its stack. Lines of user files, and lines without a file (notebook cells), are kept. A small cache is
    kept too, because the next trace would reread it.
    """
    entries = [(file, entry) for file, entry in list(linecache.cache.items()) if len(entry) > 1]  # else not read yet
    ours = {file: lines for file, (_, time, lines, _) in entries if time is not None and is_library(file)}
    if sum(map(len, ours.values())) > _MOST_LINES:
        for file in ours:
            linecache.cache.pop(file, None)


def give_back_pages() -> None:
    """Make glibc return its free pages to the system. Without this call it returns only the end of its heap.

    A trace creates and frees thousands of small objects between objects that stay, which leaves holes of some
    megabytes. Without glibc this does nothing.
    """
    if _trim is not None:
        _trim(0)


def keep_pages() -> None:
    """Make glibc keep up to 64 MiB of freed memory of a step for the next step.

    glibc returns the end of its heap to the system when it is twice as large as the largest block freed so far. A step
    ends by freeing all gradients. The next step would then have a page fault per 4 KiB, 3 to 8 % of the time of a small
    step. To prevent this, a large block is allocated and freed. It is never written, so it costs nothing.
    """
    if _trim is not None:
        torch.empty(_MOST_TAKEN_FOR_ORDINARY - (64 << 10), dtype=torch.uint8)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
