"""Request to keep gradients of some parameters out of the vectors of others, because they are summed differently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..functions import LayerConversion, PyTree, Request

__all__ = ["SummedApart"]


@dataclass(frozen=True)
class SummedApart(Request):
    """Request that parameters with different labels do not share a flat vector."""

    label: Callable[[PyTree], PyTree]

    def for_layers(self, conversion: LayerConversion) -> Request:
        return replace(self, label=conversion.decision(self.label))

    def __str__(self) -> str:
        return "kept parameters summed apart"
