"""Options of the user that do not change the meaning of a program."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..program import Memory

REPEATS = "repeats"  # no pass: the staging of repeated layers once. It is switched off like a pass


@dataclass(frozen=True)
class Options:
    """Options of the user that do not change the meaning of the program."""

    bucket: int | str | None = None  # bytes per collective; "auto" selects a size; None does not combine collectives
    without: frozenset[str] = frozenset()  # names of the passes that are disabled
    backend: str = "eager"  # executor of the ops between collectives: "eager" or "inductor"
    donate: bool = False  # whether the program may write into the memory of the state
    reduction: str = "fast"  # "fast" for sums in any order, "ordered" for sums in rank order
    memory: Memory | None = None  # refuses a program with a predicted peak above it


def pass_names(without: str | Collection[str]) -> frozenset[str]:
    """Return a set of pass names; a single name may be given as a string.

    >>> pass_names("buckets") == pass_names(["buckets"])
    True
    """
    return frozenset([without] if isinstance(without, str) else without)
