"""Request to keep the optimizer's state in another memory, and to update there (ZeRO-Offload, arXiv 2101.06840)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..functions import Request


@dataclass(frozen=True)
class OffloadedState(Request):
    """Request to keep the state of parameters in a memory, and to update there.

    Attributes:
        memory: the memory.
        fraction: the share of the parameters, by their bytes. The others are updated on the device.
    """

    memory: str
    fraction: float = 1.0

    def memories(self, params: Sequence[Any]) -> list[str]:
        """Return the memory of the update of each parameter: even over the parameters, in their order."""
        found, total, moved = list[str](), 0.0, 0
        for size in (getattr(leaf, "nbytes", 0) for leaf in params):
            total += size * self.fraction
            is_moved = moved + size / 2 <= total
            moved += size if is_moved else 0
            found.append(self.memory if is_moved else "device")
        return [self.memory] * len(found) if self.fraction == 1 else found

    def __str__(self) -> str:
        share = "" if self.fraction == 1 else f"{100 * self.fraction:g} % of the "
        return f"{share}optimizer's state on the {self.memory}"
