"""The legal order of transforms, and so of their requests."""

from __future__ import annotations

from enum import IntEnum


class Order(IntEnum):
    """Position of a transform in the legal order of a chain, innermost first."""

    PRECISION = 0
    TENSOR = 1
    DATA = 2
    ACCUMULATE = 3
    PIPELINE = 4
    REPLICAS = 5

    @property
    def words(self) -> str:
        return (
            *("precision and remat", "tensor and sequence", "zero / data", "accumulate", "pipeline"),
            "local SGD",
        )[self]
