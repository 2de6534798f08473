"""Base class of requests: what a transform asks of the code that compiles a function or trains with it.

A local function has a layout of its arguments and an ordered tuple of requests, innermost transform first. Code that
serves requests looks for a class of requests with the hook that it calls, such as `StateRequest`. It does not know the
transforms that make them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from sharding_specs import Mesh

PyTree = Any
SpecTree = Any


class LayerConversion(Protocol):
    """Conversion of functions of stacked parameters to functions of the layers, each a parameter."""

    def specs(self, specs: Callable[[tuple[PyTree, ...]], SpecTree]) -> Callable[[tuple[PyTree, ...]], SpecTree]:
        """Convert a function of the arguments that returns specs of the parameters."""
        ...

    def decision(self, decide: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
        """Convert a function of the parameters that returns a value for each of them."""
        ...


@dataclass(frozen=True)
class Request:
    """Request of a transform. A subclass is a frozen dataclass in a separate file; each hook's default does nothing."""

    def virtual_axes(self, mesh: Mesh) -> Mapping[str, int]:
        """Return axes that the function is partitioned over and that no mesh has, with their sizes on a mesh."""
        return {}

    def for_layers(self, conversion: LayerConversion) -> Request:
        """Return the request for the function of separate layers, if it is made for one of stacked layers."""
        return self

    def without_schedule(self) -> Request | None:
        """Return the request for a function without a pipeline schedule. None if it is part of the schedule."""
        return self
