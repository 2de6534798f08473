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

import torch

from .. import _torch
from ..ir import is_library

__all__ = ["forget_library_lines", "give_back_pages", "keep_pages", "release_trace_memory", "traced_in"]

_MOST_LINES = 1_000  # a tenth of a megabyte; to read ten times as many takes a millisecond
_MOST_SHAPES = 10_000  # ten megabytes
_MOST_TAKEN_FOR_ORDINARY = 32 << 20  # bytes; glibc's DEFAULT_MMAP_THRESHOLD_MAX


@contextmanager
def release_trace_memory() -> Iterator[None]:
    """Make a program inside; afterwards caches are small, and memory that is free now is the system's again."""
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
    """Trace inside; afterwards what became garbage is gone, and shapes that were cached."""
    with _collected(), _torch.forgetting_shapes(_MOST_SHAPES):
        yield


@contextmanager
def _collected() -> Iterator[None]:
    """Collect what became garbage inside, and look at nothing older for it.

    Graphs are cycles, which Python would come to when the process has grown by a quarter: in training, never. While it
    does not collect, what is made stays in the youngest generation, which alone is looked through in the end: to walk
    through all that torch holds would take longer than the trace. A user who collects inside makes it older.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:  # else an outer one will collect, or a user has forbidden it
            gc.collect(0)
            gc.enable()


def forget_library_lines() -> None:
    """Drop the lines of torch's and our own files from `linecache`, which reads a file again when it is asked.

    Importing torch leaves some 4 MiB of them, read to say where an op was registered, and every fake mode reads the
    files on its stack. Lines that are in no file (a notebook's cells), and those of the user's files, stay, and so do
    few, which the next trace would read again.
    """
    entries = [(file, entry) for file, entry in list(linecache.cache.items()) if len(entry) > 1]  # else not read yet
    ours = {file: lines for file, (_, time, lines, _) in entries if time is not None and is_library(file)}
    if sum(map(len, ours.values())) > _MOST_LINES:
        for file in ours:
            linecache.cache.pop(file, None)


def give_back_pages() -> None:
    """Let glibc return its free pages to the system, which by itself it does only at the end of its heap.

    A trace makes and drops thousands of small things between others that stay, and so leaves holes of some megabytes;
    elsewhere than in glibc there is nothing to call.
    """
    if _trim is not None:
        _trim(0)


def keep_pages() -> None:
    """Let glibc keep what a step frees for the next step, up to 64 MiB.

    It returns the end of its heap to the system when that is twice as large as the largest block that was freed so far,
    and a step ends by freeing all gradients: the next would have to ask for each page anew, a fault per 4 KiB, 3 to 8 %
    of a small step. A block that nobody writes into costs nothing, and once freed counts as the largest.
    """
    if _trim is not None:
        torch.empty(_MOST_TAKEN_FOR_ORDINARY - (64 << 10), dtype=torch.uint8)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
