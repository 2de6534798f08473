"""The table of docs/hugging_face.md, measured: the rules of each family of transformers, and what they give.

`python -m tests.hugging_face_page` writes it into the page.
"""

from __future__ import annotations

import math
from pathlib import Path

from .models.families import FAMILIES
from .models.of_rules import measured, source_of
from .written import with_part

__all__ = ["PAGE", "rows_of"]

PAGE = Path(__file__).parent.parent / "docs" / "hugging_face.md"
BEGIN, END = "<!-- rules: written by python -m tests.hugging_face_page -->\n", "<!-- end of rules -->"
HEAD = "| family | rules from | parameters sharded | gathers over tensor | largest error |\n|---|---|---|---|---|\n"


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of the table's rows by family."""
    lines = text.partition(BEGIN)[2].partition(END)[0].removeprefix(HEAD).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in rows}


def row(family: str) -> str:
    """Return the row of a family. The error is the largest of three plans, rounded up to a power of ten."""
    found = [measured(family, kind) for kind in ("data", "zero", "pipe")]
    error = math.ceil(math.log10(max(each.error for each in found)))
    cells = [family, source_of(family), f"{found[0].share:.0%}", found[0].gathers, f"1e{error}"]
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    table = HEAD + "".join(map(row, FAMILIES))
    PAGE.write_text(with_part(PAGE.read_text(), BEGIN, table, END))
