"""Tables: printed, and written into `docs/benchmarks.md` between a pair of markers per benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table with aligned columns."""
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in texts
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def write(section: str, text: str, document: Path = DOCUMENT) -> None:
    """Replace what stands between `<!-- section -->` and `<!-- end section -->`."""
    before, after = parts_around(section, document)
    document.write_text(f"{before}<!-- {section} -->\n{text}\n<!-- end {section} -->{after}")


def parts_around(section: str, document: Path = DOCUMENT) -> tuple[str, str]:
    """What stands before a section, and after it.

    Raises:
        ValueError: when there is none.
    """
    begin, end = f"<!-- {section} -->", f"<!-- end {section} -->"
    before, found, rest = document.read_text().partition(begin)
    if not found:
        raise ValueError(f"{document} has no section {begin}, into which to write a table")
    return before, rest.split(end)[1]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    first, _, third = statistics.quantiles(values, n=4)
    return first, third
