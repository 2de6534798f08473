"""Where an op came from: the user's file and line, found in the Python stack while a function is traced.

A traced graph keeps no stack of its own, and one graph is interpreted again by every outer transform, so the frame is
taken once, at the innermost trace, and carried from then on (`at_source`).
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import einops
import optree
import torch

from .. import _torch

__all__ = [
    "Source",
    "at_source",
    "count_stage_boundaries",
    "current_source",
    "is_in_region",
    "is_library",
    "pass_stage_boundary",
    "raising_source",
    "recompute_region",
    "warn_at",
]

_HERE = os.path.dirname(os.path.abspath(__file__))
_SKIPPED = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, einops.__file__, optree.__file__, _HERE)
)
_STDLIB = os.path.dirname(os.path.abspath(linecache.__file__)) + os.sep


@dataclass(frozen=True)
class Source:
    """One line of user code; `recompute_region` names the call of an `fp.recompute` function that it is part of.

    `casts_parameters` marks the casts with which `fp.mixed_precision` begins, and so their transposes. `stage` counts
    the `fp.stage_boundary` calls that the model made before.

    >>> Source("model.py", 12, "block", "h = x @ w")
    Source(model.py:12 in block: h = x @ w)
    """

    file: str
    line: int
    function: str
    text: str
    region: str | None = None
    casts_parameters: bool = False
    stage: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    def __repr__(self) -> str:
        return f"Source({self} in {self.function}: {self.text})"


@dataclass
class _Around:
    """What stands around the code that a thread runs.

    Attributes:
        inherited: the lines that ops come from, whatever the stack says, innermost last.
        regions: names of the regions that it is in.
        stages: boundaries passed, per function that is being traced.
    """

    inherited: list[Source | None] = field(default_factory=list)
    regions: list[str] = field(default_factory=list)
    stages: list[int] = field(default_factory=lambda: [0])


_region_numbers = itertools.count()


def _around() -> _Around:
    return _torch.of_thread("source", _Around)


@contextmanager
def at_source(source: Source | None) -> Iterator[None]:
    """Say that ops recorded inside come from this line, whatever the stack says."""
    inherited = _around().inherited
    inherited.append(source)
    try:
        yield
    finally:
        inherited.pop()


@contextmanager
def recompute_region(name: str) -> Iterator[None]:
    """Say that ops recorded inside belong together, in one region of that name."""
    regions = _around().regions
    regions.append(f"{name} {next(_region_numbers)}")
    try:
        yield
    finally:
        regions.pop()


@contextmanager
def count_stage_boundaries() -> Iterator[None]:
    """Count the stage boundaries passed inside from 0."""
    counts = _around().stages
    counts.append(0)
    try:
        yield
    finally:
        counts.pop()


def pass_stage_boundary() -> None:
    """Say that ops recorded from here on belong to the next stage."""
    counts = _around().stages
    if len(counts) > 1:
        counts[-1] += 1


def is_in_region() -> bool:
    """Whether a function marked by `fp.recompute` is running."""
    return bool(_around().regions)


def current_source() -> Source | None:
    """The line of user code that is running now, or the inherited one."""
    around = _around()
    if around.inherited and around.inherited[-1] is not None:
        return around.inherited[-1]
    frame = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            code, region = frame.f_code, around.regions[-1] if around.regions else None
            return _source(code.co_filename, frame.f_lineno, code.co_name, region, around.stages[-1])
        frame = frame.f_back  # type: ignore[assignment]
    return None


def raising_source(error: BaseException) -> Source | None:
    """The innermost line of user code that an exception passed through."""
    found = None
    step = error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if not is_library(code.co_filename):
            found = _source(code.co_filename, step.tb_lineno, code.co_name)
        step = step.tb_next
    return found or current_source()


def warn_at(source: Source | None, message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, so that Python's filters count its repetitions as theirs."""
    if source is None:
        warnings.warn(message, category, stacklevel=3)
    else:
        warnings.warn_explicit(message, category, source.file, source.line, registry=_warned)


_warned: dict[Any, Any] = {}


@lru_cache(maxsize=4096)
def is_library(filename: str) -> bool:
    """Whether a file belongs to Python, torch, einops, optree or this package, and not to the user."""
    path = os.path.abspath(filename)
    in_stdlib = path.startswith(_STDLIB) and "site-packages" not in path
    return filename.startswith("<frozen") or in_stdlib or path.startswith(_SKIPPED)


@lru_cache(maxsize=65536)
def _source(file: str, line: int, function: str, region: str | None = None, stage: int = 0) -> Source:
    return Source(file, line, function, linecache.getline(file, line).strip(), region, stage=stage)
