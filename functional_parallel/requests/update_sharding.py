"""Requests about the optimizer's update over an axis that does not shard the parameters (ZeRO-1 and 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..functions import Applied, PyTree, Request


@dataclass(frozen=True)
class UpdateSharding(Request):
    """Request to shard the update and the optimizer state over one more axis, as `Resolved.update` says."""

    axis: str
    flat: bool = False  # whether the update concatenates all parameters and splits them at any element
    whole_gradients: bool = False  # whether a rank stores full gradients until the update (ZeRO-1); for estimates

    def __str__(self) -> str:
        return f"update{' of flat vectors' if self.flat else ''} sharded over {self.axis!r}"


@dataclass(frozen=True)
class SummedApart(Request):
    """Request that parameters with different labels do not share a flat vector."""

    label: Callable[[PyTree], PyTree]

    def __str__(self) -> str:
        return "kept parameters summed apart"


def flat_update(applied: Applied) -> bool:
    return any(each.flat for each in applied.all(UpdateSharding))
