"""The legal order of transforms, and so of their requests."""

from __future__ import annotations

from enum import IntEnum


class Order(IntEnum):
    PRECISION = 0
    TENSOR = 1
    DATA = 2
    MEMORY = 3
    ACCUMULATE = 4
    PIPELINE = 5
    REPLICAS = 6

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = ("precision and remat", "tensor and sequence", "zero / data", "offload", "accumulate", "pipeline", "local SGD")
