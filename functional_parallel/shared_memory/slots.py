"""Sizes of the shared memory of a collective: a slot of its size up to `AT_ONCE` bytes, else one of four pieces."""

from __future__ import annotations

HALF = 2 << 20  # bytes of a half, at most
SMALL_HALF = 256 << 10
AT_ONCE = 3 << 19
PIECE = 512 << 10
AHEAD = 2
ROOM = 8 << 20  # bytes of a channel; pages are allocated at the first write, so small messages use few
LARGEST = ROOM // 2  # bytes of a message in a channel
ALIGNMENT = 64  # a cache line, so that two ranks do not write to the same line


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def places(count: int, length: int, itemsize: int) -> list[slice]:
    """Return the slices of the pieces of each tensor: one for the full tensor, or several of equal size."""
    step = _piece(count, length, itemsize)
    return [slice(begin, min(begin + step, length)) for begin in range(0, max(length, 1), step)]


def slot_bytes(count: int, length: int, itemsize: int) -> int:
    """Return the bytes that a collective uses in every rank's memory. The arguments are the arguments of `places`."""
    step = _piece(count, length, itemsize)
    return min(-(-length // step), 2 * AHEAD) * count * aligned(min(step, length) * itemsize)


def _piece(count: int, length: int, itemsize: int) -> int:
    if count * aligned(length * itemsize) <= AT_ONCE:
        return max(length, 1)
    return max(PIECE // count // ALIGNMENT, 1) * ALIGNMENT // itemsize
