"""Request to run a function once per microbatch, as partition over a virtual axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sharding_specs import Mesh

from ..functions import Request

__all__ = ["Microbatches"]


@dataclass(frozen=True)
class Microbatches(Request):
    """Request to split the batch over an axis that no mesh has. The count may depend on the mesh."""

    axis: str
    count: int | Callable[[Mesh], int]

    def virtual_axes(self, mesh: Mesh) -> Mapping[str, int]:
        return {self.axis: self.count(mesh) if callable(self.count) else self.count}

    def __str__(self) -> str:
        return f"{'scheduled' if callable(self.count) else self.count} microbatches"
