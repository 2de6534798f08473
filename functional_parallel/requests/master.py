"""Request to keep parameters, optimizer state and update on one rank of a data axis: torch's DataParallel."""

from __future__ import annotations

from dataclasses import dataclass

from ..functions import Layout, Request

__all__ = ["Master", "owners_of"]


@dataclass(frozen=True)
class Master(Request):
    """Request to keep all that a training step holds between steps on one rank of an axis."""

    axis: str
    rank: int  # index of the master along the axis

    def __str__(self) -> str:
        return f"training state on rank {self.rank} of {self.axis!r}"


def owners_of(layout: Layout) -> dict[str, int]:
    """Return the axes with a master, and its index along each: the `owner` of the specs of all training state."""
    return {each.axis: each.rank for each in layout.all(Master)}
