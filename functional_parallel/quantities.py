"""Numbers from a caller, which are checked on entry, before they lead to a meaningless result, and sizes in bytes."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import TypeGuard


def is_number(value: float | str | None) -> TypeGuard[float]:
    """Whether a value is a finite number.

    >>> [is_number(value) for value in (0, 1e-3, "1e-3", True, float("nan"))]
    [True, True, False, False, False]
    """
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_non_negative(value: float | str | None) -> bool:
    """Whether a value is a finite number of at least 0, for example a time or a size."""
    return is_number(value) and value >= 0


def is_positive(value: float | str | None) -> bool:
    """Whether a value is a number above 0, infinity included, for example a rate or a capacity."""
    return value == math.inf or (is_number(value) and value > 0)


def is_positive_int(value: float | str | None) -> bool:
    """Whether a value is an integer of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def readable_bytes(count: int) -> str:
    """Format a number of bytes with a binary unit.

    >>> readable_bytes(1536), readable_bytes(7)
    ('1.5 KiB', '7 B')
    """
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


_UNITS = (
    {"": 1, "B": 1}
    | {f"{p}B": 1000**n for n, p in enumerate("kMGT", 1)}
    | {f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)}
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*")


def parse_bytes(size: int | str) -> int:
    """Parse a size in bytes: a number, with or without a unit of powers of 1000 (kB, …) or of 1024 (KiB, …).

    >>> parse_bytes("1.5 KiB"), parse_bytes("8GB"), parse_bytes(7)
    (1536, 8000000000, 7)
    """
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    found = _SIZE.fullmatch(size) if isinstance(size, str) else None
    unit = None if found is None else {name.lower(): factor for name, factor in _UNITS.items()}.get(found[2].lower())
    if found is None or unit is None or float(found[1]) * unit < 1:
        raise ValueError(f"{size!r} is no size: write bytes, as 8 << 30, or with a unit, as '8GiB', '8GB' or '512 MiB'")
    return int(float(found[1]) * unit)
