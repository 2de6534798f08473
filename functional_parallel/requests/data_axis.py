"""Request that marks a mesh axis as one that shards the batch."""

from __future__ import annotations

from dataclasses import dataclass

from ..functions import Request

__all__ = ["DataAxis"]


@dataclass(frozen=True)
class DataAxis(Request):
    """Mark of an axis that shards the batch. Microbatches are cut along the dims that such axes shard."""

    axis: str

    def __str__(self) -> str:
        return f"batch sharded over {self.axis!r}"
