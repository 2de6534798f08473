"""The legal order of transforms, and so of their requests."""

from __future__ import annotations

from enum import IntEnum


class Order(IntEnum):
    PRECISION = 0
    TENSOR = 1
    DATA = 2
    ACCUMULATE = 3
    PIPELINE = 4
    REPLICAS = 5

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = ("precision and remat", "tensor and sequence", "zero / data", "accumulate", "pipeline", "local SGD")
