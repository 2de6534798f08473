"""How much of the memory that the ranks of a host share a collective takes, by the sizes of what is sent.

Each rank has a piece of it: two halves for collectives, which are used in turn, and a channel to every other rank for
single messages. A collective of up to `AT_ONCE` bytes takes a slot of its size, a larger one a slot for four pieces of
about `PIECE` bytes. A half begins at `SMALL_HALF` and grows to the largest slot that was asked for.
"""

from __future__ import annotations

__all__ = [
    "AHEAD",
    "ALIGNMENT",
    "AT_ONCE",
    "GATHERED",
    "HALF",
    "LARGEST",
    "ROOM",
    "SMALL_HALF",
    "aligned",
    "places",
    "slot_bytes",
]

HALF = 2 << 20  # at most
SMALL_HALF = 256 << 10
AT_ONCE = 3 << 19
PIECE = 512 << 10
AHEAD = 2
ROOM = 8 << 20  # of a channel; pages are taken when first written, so a small message's channel stays small
LARGEST = ROOM // 2  # message in a channel
GATHERED = 1 << 20  # bytes of all ranks, up to which a maximum gathers them; of more, parts are exchanged first
ALIGNMENT = 64  # a cache line, so that ranks do not write into each other's


def aligned(size: int) -> int:
    """Return bytes, filled up to whole cache lines.

    >>> aligned(1), aligned(64), aligned(65)
    (64, 64, 128)
    """
    return -(-size // ALIGNMENT) * ALIGNMENT


def places(count: int, length: int, itemsize: int) -> list[slice]:
    """Return where pieces lie in each of several tensors: one for all of it, or several alike.

    Args:
        count: number of tensors that are sent together.
        length: elements of each.
        itemsize: bytes of an element.
    """
    if count * aligned(length * itemsize) <= AT_ONCE:
        return [slice(0, length)]
    step = max(PIECE // count // ALIGNMENT, 1) * ALIGNMENT // itemsize
    return [slice(begin, min(begin + step, length)) for begin in range(0, length, step)]


def slot_bytes(count: int, length: int, itemsize: int) -> int:
    """Return the bytes of every rank's memory that a collective takes; arguments as of `places`.

    >>> slot_bytes(1, 1000, 4), slot_bytes(1, 1_000_000, 4)
    (4032, 2097152)
    """
    found = places(count, length, itemsize)
    return min(len(found), 2 * AHEAD) * count * aligned(found[0].stop * itemsize)
