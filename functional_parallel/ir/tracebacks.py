"""Tracebacks of errors in user code, without the frames of torch and of this library between the user's lines."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar

from ..errors import Error
from .source import is_library

Params = ParamSpec("Params")
R = TypeVar("R")

_IN_FULL = "FUNCTIONAL_PARALLEL_FULL_TRACEBACK"
_PROGRAM = "<"  # the functions that programs are written to have no file


def with_short_tracebacks(function: Callable[Params, R]) -> Callable[Params, R]:
    """Shorten the tracebacks of errors that leave a function that users call.

    A trace runs the user's function below a hundred frames of torch and of this library. Of the frames that
    the error passed, only the user's remain. If the error is none of this library and was raised in it, its last frame
    remains too. `FUNCTIONAL_PARALLEL_FULL_TRACEBACK=1` in the environment leaves all.
    """

    @functools.wraps(function)
    def call(*args: Params.args, **kwargs: Params.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if os.environ.get(_IN_FULL, "0") not in ("", "0"):
                raise
            for each in _chain(error):
                each.__traceback__ = _shortened(each)
            short = error.__traceback__  # `raise` alone would take the full one in Python 3.10
            raise error.with_traceback(short)  # FUNCTIONAL_PARALLEL_FULL_TRACEBACK=1 shows all frames  # noqa: B904

    return call


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [each.__cause__, each.__context__]


def _shortened(error: BaseException) -> TracebackType | None:
    entries = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    kept = [each for each in entries if not _is_hidden(each)]
    if entries and not isinstance(error, Error) and _is_ours(entries[-1]):
        kept.append(entries[-1])
    result: TracebackType | None = None
    for each in reversed(kept):
        result = TracebackType(result, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return result


def _is_hidden(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(_PROGRAM) or is_library(file)


def _is_ours(entry: TracebackType) -> bool:
    return str(entry.tb_frame.f_globals.get("__name__")).startswith(f"{__name__.split('.')[0]}.")
