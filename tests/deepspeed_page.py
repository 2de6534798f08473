"""The table of the keys of ds_config.json in docs/deepspeed.md, written from the schema.

`python -m tests.deepspeed_page` writes it.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from functional_parallel.interop.deepspeed.schema import CHANGED, KEYS, Key

from .written import with_part

__all__ = ["PAGE", "with_table"]

PAGE = Path(__file__).parent.parent / "docs" / "deepspeed.md"
BEGIN, END = "<!-- keys: written by python -m tests.deepspeed_page -->", "<!-- end of keys -->"
_TITLES = {
    "honoured": ("Honoured keys", "default | effect"),
    "not applicable": ("Keys that are not applicable", "default | reason"),
    "refused": ("Refused keys", "accepted value | reason"),
}


def table() -> str:
    """Return a table for each treatment. Not applicable keys of one block with the same reason share a row."""
    parts = [""]
    for treatment, (title, columns) in _TITLES.items():
        parts += ["", f"### {title}", "", f"| key | {columns} |", "|---|---|---|"]
        keys = [key for key in KEYS.values() if key.treatment == treatment]
        for (_, text), group in groupby(keys, key=lambda key: (_block(key), key.text)):
            rows = list(group)
            for row in [rows] if treatment == "not applicable" else [[key] for key in rows]:
                names = ", ".join(f"`{key.path}`" if key is row[0] else f"`{_name(key)}`" for key in row)
                parts.append(f"| {names} | {', '.join(map(_default, row))} | {text} |")
    return "\n".join([*parts, "", ""])


def _block(key: Key) -> str:
    return key.path.rpartition(".")[0]


def _name(key: Key) -> str:
    return key.path.rpartition(".")[2]


def _default(key: Key) -> str:
    if key.path in CHANGED:
        since, old = CHANGED[key.path]
        return f"{_shown(key.default)} ({_shown(old)} before {since})"
    return _shown(key.default)


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return str(value).lower() if isinstance(value, bool) else f"{value:,}" if isinstance(value, int) else str(value)


def with_table(text: str) -> str:
    """Return the text of the page with the table written again."""
    return with_part(text, BEGIN, table(), END)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
