"""Request to keep the optimizer's state, or sums of gradients, in another memory (ZeRO-Offload, arXiv 2101.06840)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..functions import Request


@dataclass(frozen=True)
class OffloadedState(Request):
    """Request to keep the state of parameters, and the sums of their gradients, in memories.

    Attributes:
        memory: the memory of the state.
        fraction: the share of the parameters, by their bytes. The others have all on the device.
        gradients: the memory of the sums of gradients.
        on_device: whether the state moves to the device for the update, which else runs in its memory.
    """

    memory: str = "device"
    fraction: float = 1.0
    gradients: str = "device"
    on_device: bool = False

    def memories(self, params: Sequence[Any], memory: str) -> list[str]:
        """Return a memory for the share of the parameters: even over the parameters, in their order."""
        found, total, moved = list[str](), 0.0, 0
        for size in (getattr(leaf, "nbytes", 0) for leaf in params):
            total += size * self.fraction
            is_moved = moved + size / 2 <= total
            moved += size if is_moved else 0
            found.append(memory if is_moved else "device")
        return [memory] * len(found) if self.fraction == 1 else found

    def __str__(self) -> str:
        share = "" if self.fraction == 1 else f"{100 * self.fraction:g} % of the "
        update = ", updated on the device" if self.on_device else ""
        sums = "" if self.gradients == "device" else f", sums of gradients on the {self.gradients}"
        return f"{share}optimizer's state on the {self.memory}{update}{sums}"
