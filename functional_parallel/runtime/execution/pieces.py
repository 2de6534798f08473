"""Run a program as functions of some hundred ops. The time to compile a Python function is quadratic in its length.

A value that another piece reads is in a dict between them. A piece takes the values that it reads in a list, which it
empties, so a value is freed after its last use.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import fx

FILE, HEAD = "<program>", 3  # the name of the file in tracebacks, and the number of lines before the lines of a piece

_LEAST, _MOST = 100, 400  # ops of a piece
_compiled = lru_cache(maxsize=256)(compile)  # pieces of repeated layers have one text

Function = Callable[[list[Any]], list[Any]]


class ProgramPiece(NamedTuple):
    run: Function
    taken: list[fx.Node]  # the values that it reads last, or returns in another form
    kept: list[fx.Node]  # further values that it reads
    made: list[fx.Node]  # the values that it returns


def cuts(ops: Sequence[str]) -> list[int]:
    """Return the positions where pieces begin, and the end. The four ops before a cut choose it.

    Equal layers are therefore cut alike, wherever they are.
    """
    found, recent = [0], 0
    for position, op in enumerate(ops):
        length = position - found[-1]
        if length == _MOST or (length >= _LEAST and recent < 0x2000):
            found.append(position)
        recent = (recent << 4 ^ zlib.crc32(op.encode())) & 0xFFFF
    return [*found, len(ops)]


def chained(
    inputs: Sequence[fx.Node], pieces: Sequence[ProgramPiece], outputs: Sequence[Any], constants: Mapping[fx.Node, Any]
) -> Function:
    keys: list[Hashable] = [out if isinstance(out, fx.Node) else number for number, out in enumerate(outputs)]
    held: dict[Hashable, Any] = {number: out for number, out in enumerate(outputs) if not isinstance(out, fx.Node)}
    held.update(constants)

    def run(handles: list[Any]) -> list[Any]:
        values = {**held, **dict(zip(inputs, handles, strict=True))}
        handles.clear()
        for piece, taken, kept, made in pieces:
            values.update(zip(made, piece([*map(values.pop, taken), *map(values.__getitem__, kept)]), strict=True))
        return list(map(values.__getitem__, keys))

    return run


def function_of(read: Sequence[str], lines: Sequence[str], returned: Sequence[str], scope: dict[str, Any]) -> Function:
    """Compile a function from a list of values, which it empties, to a list. Constants are in its scope."""
    head = ["def run(values):", f"[{', '.join(read)}] = values", "values.clear()"]
    exec(_compiled("\n    ".join([*head, *lines, f"return [{', '.join(returned)}]"]), FILE, "exec"), scope)
    result: Function = scope["run"]
    return result
