"""Text of lists and of the structure of pytrees in messages."""

from __future__ import annotations

import optree

_MOST = 8  # lines or names in a list of a message


def on_one_line(text: str) -> str:
    """Return `text` with each run of whitespace replaced by one space."""
    return " ".join(text.split())


def structure_as_text(tree: optree.PyTreeSpec) -> str:
    """Return a tree's structure as text for messages, such as `{'b': *, 'w': *}`."""
    text = on_one_line(str(tree)).removeprefix("PyTreeSpec(").removesuffix(")")
    return text.removesuffix(", NoneIsLeaf")


def listed(lines: list[str]) -> list[str]:
    """Return the first lines of a list, and the number of remaining lines."""
    more = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return [*lines[:_MOST], *more]
