"""Source line of an op: the user's file and line, found in the Python stack while a function is traced.

A traced graph does not store a stack, and every outer transform reruns the graph. The frame is therefore read once, in
the innermost trace, and kept in all later runs (`at_source`).
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from traceback import walk_tb
from typing import Any

import einops
import optree
import torch

import sharding_specs

from .. import _torch

_HERE = os.path.dirname(os.path.abspath(__file__))
_SKIPPED = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (torch.__file__, einops.__file__, optree.__file__, sharding_specs.__file__, _HERE)
)
_STDLIB = os.path.dirname(os.path.abspath(linecache.__file__)) + os.sep


@dataclass(frozen=True)
class Source:
    """One line of user code.

    >>> Source("model.py", 12, "block", "h = x @ w")
    Source(model.py:12 in block: h = x @ w)
    """

    file: str
    line: int
    function: str  # that contains the line
    text: str
    region: str | None = None  # name of the call of an `fp.recompute` or checkpointed function that contains the op
    implied: bool = field(default=False, compare=False)  # whether the library emitted the op for the line
    stage: int = field(default=0, compare=False)  # number of earlier `fp.stage_boundary` calls of the model

    def is_line_of(self, other: Source) -> bool:
        return (self.file, self.line, self.function) == (other.file, other.line, other.function)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    def __repr__(self) -> str:
        return f"Source({self} in {self.function}: {self.text})"


@dataclass
class _Around:
    inherited: list[Source | None] = field(default_factory=list)  # lines that override the stack, innermost last
    regions: list[str | None] = field(default_factory=list)  # names of the regions that contain the code
    stages: list[int] = field(default_factory=lambda: [0])  # boundaries passed, per function that is being traced


_region_numbers = itertools.count()


def _around() -> _Around:
    return _torch.of_thread("source", _Around)


def at_source(source: Source | None) -> AbstractContextManager[None]:
    """Set the source line of ops recorded inside, regardless of the stack. None leaves the stack in effect."""
    return _torch.pushed(_around().inherited, source)


def recompute_region(name: str | None) -> AbstractContextManager[None]:
    """Put the ops recorded inside into one region, or into none. A number is appended to its name."""
    return _torch.pushed(_around().regions, None if name is None else f"{name} {next(_region_numbers)}")


def count_stage_boundaries() -> AbstractContextManager[None]:
    """Count the stage boundaries passed inside, starting at 0."""
    return _torch.pushed(_around().stages, 0)


def pass_stage_boundary() -> None:
    """Assign ops recorded from here on to the next stage. Outside of a trace, do nothing."""
    counts = _around().stages
    if len(counts) > 1:
        counts[-1] += 1


def stages_passed() -> int:
    return _around().stages[-1]


def place_of_call() -> Source:
    """Return the line that is running now, with its region and stage, also where no line is the user's."""
    around = _around()
    region = around.regions[-1] if around.regions else None
    return current_source() or Source("", 0, "", "", region, stage=around.stages[-1])


def moved(first: Source, now: Source) -> Callable[[Source], Source]:
    """Return the line that an op of a call has in an equal call at another place. Regions inside get new numbers."""
    regions: dict[str | None, str | None] = {None: None, first.region: now.region}

    def move(source: Source) -> Source:
        if source.region not in regions:
            assert source.region is not None
            regions[source.region] = f"{source.region.rpartition(' ')[0]} {next(_region_numbers)}"
        line, stage = now if source.is_line_of(first) else source, source.stage + now.stage - first.stage
        return replace(line, region=regions[source.region], implied=source.implied, stage=stage)

    return move


def is_in_region() -> bool:
    return bool(_around().regions)


def current_source() -> Source | None:
    """Return the line of user code that is running now, or the line set by `at_source`."""
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
    """Return the innermost line of user code that an exception passed through, else the current line."""
    found = None
    for frame, line in walk_tb(error.__traceback__):
        if not is_library(frame.f_code.co_filename):
            found = _source(frame.f_code.co_filename, line, frame.f_code.co_name)
    return found or current_source()


def warn_at(source: Source | None, message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the user's line, so that Python's filters detect repeated warnings of that line."""
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
