"""The part of a page that a script writes, between two marks."""

from __future__ import annotations

__all__ = ["with_part"]


def with_part(text: str, begin: str, content: str, end: str) -> str:
    """Return a text with `content` between its two marks.

    Raises:
        ValueError: if the text does not have the marks.
    """
    before, _, rest = text.partition(begin)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"the text needs the lines {begin!r} and {end!r}")
    return before + begin + content + end + after
