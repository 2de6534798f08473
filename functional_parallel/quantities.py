"""Predicates for numbers from a caller, which are checked on entry, before they lead to a meaningless result."""

from __future__ import annotations

import math
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
