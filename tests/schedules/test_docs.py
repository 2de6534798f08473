"""The table of schedules in the documentation is the registry."""

from __future__ import annotations

from pathlib import Path

from functional_parallel.schedules import FAMILIES

PAGE = Path(__file__).parent.parent.parent / "docs" / "schedules.md"


def test_the_table_is_the_registry() -> None:
    rows = [line for line in PAGE.read_text().split("\n") if line.startswith("| `")]
    assert rows == [
        f"| `{name}` | {family.domain} | {family.bubble} | {family.peak} | {family.paper} |"
        for name, family in FAMILIES.items()
    ]
