"""Effect of each pass on a program, which is lowered again for it: a row per pass, and the text before and after."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from sharding_specs import Mesh

from ..quantities import readable_bytes
from .explain import columns
from .memory import memory_of
from .traffic import collectives_of

Watch: TypeAlias = Callable[[str, Any, Mesh], None]  # told of the last pass, the program and the mesh of the trace
_HEADERS = ("pass", "ops", "collectives", "bytes sent", "peak of live tensors")


@dataclass(frozen=True)
class PassSnapshot:
    ops: int
    collectives: int
    bytes_sent: int
    peak: int

    def cells(self) -> tuple[str, ...]:
        return str(self.ops), str(self.collectives), readable_bytes(self.bytes_sent), readable_bytes(self.peak)


@dataclass
class PassRecorder:
    """Recorder of each program after each pass; the first entry is as traced, or as cut out of another program."""

    with_text: bool = False
    moments: dict[str, list[tuple[str, PassSnapshot, str]]] = field(default_factory=dict)

    def add(self, name: str, program: Any, mesh: Mesh) -> None:
        found = [one for one in collectives_of(program.traced, mesh) if set(one.axes) <= set(program.mesh.axis_names)]
        ops, sent = len(list(program.traced.nodes)), sum(one.bytes for one in found)
        snapshot = PassSnapshot(ops, len(found), sent, memory_of("", program.traced).peak)
        self.moments.setdefault(program.name, []).append((name, snapshot, str(program) if self.with_text else ""))

    def table(self, name: str, mesh: str, notes: tuple[str, ...]) -> PassTable:
        """Return one row per pass. For a program cut out of another, only passes that changed it have a row."""
        rows = []
        for index, (program, moments) in enumerate(self.moments.items()):
            pairs = itertools.pairwise(moments)
            found = [PassRow(passed, before, after, program) for (_, before, _), (passed, after, _) in pairs]
            cut = index > 0  # programs cut out of another; sums of one op would dominate the table
            rows += [row for row in found if not cut or (row.before != row.after and row.before.ops > 1)]
        if len(self.moments) > 1:
            notes = (
                *notes,
                f"{name} as a whole, before it is cut, is shown at the shapes of one microbatch",
                "programs cut out of it have a row for each pass that changed them, unless they are of one op",
            )
        return PassTable(name, mesh, tuple(rows), notes)

    def around(self, name: str) -> tuple[str, str]:
        texts = []
        for moments in self.moments.values():
            found = [index for index, (passed, _, _) in enumerate(moments) if passed == name and index > 0]
            if found:
                texts.append((moments[found[0] - 1][2], moments[found[-1]][2]))
        if not texts:
            passed = (each for moments in self.moments.values() for each, _, _ in moments[1:])
            names = ", ".join(map(repr, dict.fromkeys(passed)))
            raise ValueError(f"no pass {name!r} ran; there ran {names}")
        before, after = zip(*texts, strict=True)
        return "\n\n".join(before), "\n\n".join(after)


@dataclass(frozen=True)
class PassRow:
    name: str
    before: PassSnapshot
    after: PassSnapshot
    program: str

    def cells(self) -> tuple[str, ...]:
        changes = zip(self.before.cells(), self.after.cells(), strict=True)
        return (self.name, *(before if before == after else f"{before} → {after}" for before, after in changes))


@dataclass(frozen=True)
class PassTable:
    name: str
    mesh: str
    rows: tuple[PassRow, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def json(self, **options: Any) -> str:
        return json.dumps(self.to_dict(), **options)

    def __str__(self) -> str:
        cells = [_HEADERS, *(row.cells() for row in self.rows)]
        if any(row.program != self.name for row in self.rows):
            where = ("program", *(row.program.removeprefix(f"{self.name}: ") for row in self.rows))
            cells = [(program, *row) for program, row in zip(_once_each(where), cells, strict=True)]
        head, *body = columns(cells)
        rule = "─" * max(map(len, (head, *body)))
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([f"{self.name} on {self.mesh}", rule, head, rule, *body, rule, *notes])

    __repr__ = __str__


def _once_each(names: tuple[str, ...]) -> list[str]:
    return [name if index == 0 or names[index - 1] != name else "" for index, name in enumerate(names)]
