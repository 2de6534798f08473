"""Request to shard the optimizer's update and state over an axis that does not shard the parameters (ZeRO-1 and 2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import optree

from sharding_specs import broadcast_specs

from ..functions import LayerConversion, Layout, PyTree, Request, SpecTree, axis_mesh

ArgumentSpecs = Callable[[tuple[PyTree, ...]], SpecTree]


@dataclass(frozen=True)
class _ParameterSharding(Request):
    specs: ArgumentSpecs

    def for_layers(self, conversion: LayerConversion) -> Request:
        return replace(self, specs=conversion.specs(self.specs))


@dataclass(frozen=True)
class UpdateSharding(_ParameterSharding):
    """Request to shard the update and the optimizer state over one more axis."""

    axis: str
    flat: bool = False  # whether the update concatenates all parameters and splits them at any element
    whole_gradients: bool = False  # whether a rank stores full gradients until the update (ZeRO-1); for estimates

    def __str__(self) -> str:
        return f"update{' of flat vectors' if self.flat else ''} sharded over {self.axis!r}"


@dataclass(frozen=True)
class NormSharding(_ParameterSharding):
    """Request to shard gradients for the sum of their squares. The last such request counts."""

    # Every ZeRO stage then sums the same numbers in the same order.

    def __str__(self) -> str:
        return "norm summed by shards"


@dataclass(frozen=True)
class SummedApart(Request):
    """Request that parameters with different labels do not share a flat vector."""

    label: Callable[[PyTree], PyTree]

    def for_layers(self, conversion: LayerConversion) -> Request:
        return replace(self, label=conversion.decision(self.label))

    def __str__(self) -> str:
        return "kept parameters summed apart"


def update_specs(layout: Layout) -> ArgumentSpecs | None:
    """Return the specs of the parameters over all axes of the update; None if it is not sharded."""
    parts = [each.specs for each in layout.all(UpdateSharding)]
    return divided_specs(*parts) if parts else None


def flat_update(layout: Layout) -> bool:
    """Whether the update concatenates the parameters."""
    return any(each.flat for each in layout.all(UpdateSharding))


def divided_specs(first: ArgumentSpecs, *further: ArgumentSpecs) -> ArgumentSpecs:
    """Return specs of the parameters where each function divides the shards of those before it."""
    if not further:
        return first

    def divided(args: tuple[PyTree, ...]) -> SpecTree:
        mesh = axis_mesh()
        specs = broadcast_specs(first(args), args[0])
        for each in further:
            specs = optree.tree_map(lambda a, b: a.divided(b, mesh), specs, broadcast_specs(each(args), args[0]))
        return specs

    return divided
