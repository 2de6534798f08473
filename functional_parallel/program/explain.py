"""Table of a program's communication: kind, axis, count, bytes, source line."""

from __future__ import annotations

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..quantities import readable_bytes
from .memory_moves import MemoryMove
from .traffic import Collective

_HEADERS = ("collective", "axis", "count", "operand", "bytes sent", "phase", "parameters", "source")
_MOVE_HEADERS = ("move", "count", "operand", "bytes", "phase", "source")
_MOST_PATTERNS = 2
_LONGEST = 48  # characters of a source line
_CONVENTION = (
    "bytes: what one rank of n sends in a ring for S bytes: psum, pmax, pmin 2(n-1)/n S; all_gather, psum_scatter,\n"
    "all_to_all, scatter (n-1)/n S; pbroadcast, broadcast, ppermute S; gather, reduce the operand"
)


@dataclass(frozen=True)
class CollectiveRow:
    kind: str
    axes: tuple[str, ...]
    count: int
    operand: str
    bytes: int
    phase: str
    source: str
    text: str
    parameters: tuple[str, ...] = ()  # paths of the parameters that are gathered, or have summed gradients

    def cells(self) -> tuple[str, ...]:
        where = f"{self.source}  {self.text}".rstrip()
        size = readable_bytes(self.bytes)
        return (self.kind, ", ".join(self.axes), str(self.count), self.operand, size, self.phase, self._names(), where)

    def _names(self) -> str:
        patterns = dict.fromkeys(re.sub(r"(?<![^/])\d+(?![^/])", "*", path) for path in self.parameters)
        shown = list(self.parameters if len(self.parameters) == 1 else patterns)
        more = f" and {len(shown) - _MOST_PATTERNS} more" if len(shown) > _MOST_PATTERNS else ""
        return ", ".join(shown[:_MOST_PATTERNS]) + more


@dataclass(frozen=True)
class Explanation:
    name: str
    mesh: str
    rows: tuple[CollectiveRow, ...]
    notes: tuple[str, ...] = field(default=())
    requests: tuple[str, ...] = field(default=())
    moves: tuple[CollectiveRow, ...] = field(default=())  # between memories

    @property
    def bytes(self) -> int:
        return sum(row.bytes for row in self.rows)

    def totals(self) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
        sums: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
        for row in self.rows:
            count, size = sums.get((row.kind, row.axes), (0, 0))
            sums[row.kind, row.axes] = (count + row.count, size + row.bytes)
        return sums

    def to_dict(self) -> dict[str, Any]:
        rows = [{**vars(row), "axes": list(row.axes)} for row in self.rows]
        totals = [
            {"kind": kind, "axes": list(axes), "count": count, "bytes": size}
            for (kind, axes), (count, size) in self.totals().items()
        ]
        found = {"name": self.name, "mesh": self.mesh, "rows": rows, "totals": totals, "bytes": self.bytes}
        return {**found, "moves": [{**vars(row), "axes": []} for row in self.moves]} if self.moves else found

    def json(self, **options: Any) -> str:
        return json.dumps(self.to_dict(), **options)

    def __str__(self) -> str:
        title = f"{self.name} on {self.mesh}"
        notes = [f"note: {note}" for note in self.notes]
        if self.requests:
            notes += textwrap.wrap(f"requested: {'; '.join(self.requests)}", 118, subsequent_indent="  ")
        moves = columns([_MOVE_HEADERS, *(_of_move(row) for row in self.moves)], right=(1, 3)) if self.moves else []
        if not self.rows:
            return "\n".join([f"{title}: no communication", *moves, *notes])
        head, *body = columns(self._cells(), right=(2, 4))
        rule = "─" * min(max(map(len, (head, *body))), 120)
        return "\n".join([title, rule, head, rule, *body, rule, *self._footer(), _CONVENTION, *moves, *notes])

    def _cells(self) -> list[tuple[str, ...]]:
        cells = [_HEADERS, *(row.cells() for row in self.rows)]
        without = _HEADERS.index("parameters")
        if any(row.parameters for row in self.rows):
            return cells
        return [(*each[:without], *each[without + 1 :]) for each in cells]

    def _footer(self) -> list[str]:
        totals = self.totals().items()
        lines = [(kind, ", ".join(axes), f"{count} ×", readable_bytes(size)) for (kind, axes), (count, size) in totals]
        count = sum(row.count for row in self.rows)
        return columns([*lines, ("total", "", f"{count} ×", readable_bytes(self.bytes))], right=(2, 3))

    __repr__ = __str__


def explain(
    name: str,
    mesh: str,
    found: Iterable[Collective],
    moves: Iterable[MemoryMove] = (),
    *,
    group: str = "line",
    notes: Iterable[str] = (),
    requests: Iterable[str] = (),
) -> Explanation:
    if group not in ("line", "axis"):
        raise ValueError(f"explain(group={group!r}): it is 'line', 'axis' or 'pass'")
    groups: dict[Any, list[Collective | MemoryMove]] = defaultdict(list)
    of_moves: dict[Any, list[Collective | MemoryMove]] = defaultdict(list)
    for one in found:
        place = (str(one.operand), one.source) if group == "line" else ()
        groups[one.kind, one.axes, one.phase, place].append(one)
    for move in moves:
        place = (str(move.operand), move.line) if group == "line" else ()
        of_moves[move.kind, move.phase, place].append(move)
    rows, moved = (tuple(_row(members, group) for members in each.values()) for each in (groups, of_moves))
    return Explanation(name, mesh, rows, tuple(notes), tuple(requests), moved)


def _of_move(row: CollectiveRow) -> tuple[str, ...]:
    where = f"{row.source}  {row.text}".rstrip()
    return row.kind, str(row.count), row.operand, readable_bytes(row.bytes), row.phase, where


def _row(members: list[Any], group: str) -> CollectiveRow:
    first = members[0]
    operands = {str(member.operand) for member in members}
    operand = str(first.operand) if len(operands) == 1 else "various"
    line, axes = (first.line, ()) if isinstance(first, MemoryMove) else (first.source, first.axes)
    where, text = (str(line), line.text) if group == "line" and line is not None else ("", "")
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    size = sum(member.bytes for member in members)
    parameters = tuple(dict.fromkeys(path for member in members for path in member.parameters))
    return CollectiveRow(first.kind, axes, len(members), operand, size, first.phase, where, text, parameters)


def columns(lines: list[tuple[str, ...]], right: tuple[int, ...] = ()) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in lines
    ]
