"""The legal order of transforms, and so of their requests."""

from __future__ import annotations

from enum import IntEnum


class Order(IntEnum):
    PRECISION = 0
    TENSOR = 1
    DATA = 2
    COMPRESS = 3
    MEMORY = 4
    ACCUMULATE = 5
    PIPELINE = 6
    REPLICAS = 7

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = (
    "precision and remat",
    "tensor and sequence",
    "zero / data",
    "compress",
    "offload",
    "accumulate",
    "pipeline",
    "local SGD",
)
