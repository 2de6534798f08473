"""Where things begin in shared memory: at cache lines, so that ranks do not write into each other's."""

from __future__ import annotations

__all__ = ["ALIGNMENT", "aligned"]

ALIGNMENT = 64


def aligned(size: int) -> int:
    """Bytes, filled up to whole cache lines.

    >>> aligned(1), aligned(64), aligned(65)
    (64, 64, 128)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT
