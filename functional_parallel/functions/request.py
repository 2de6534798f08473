"""Base class of requests from a transform to the code that compiles a function or trains with it.

That code looks for a class of requests with the hook that it calls. It does not know the transforms that make them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sharding_specs import Mesh

PyTree = Any
SpecTree = Any


@dataclass(frozen=True)
class Request:
    """Request of a transform. A subclass is a frozen dataclass in a separate file; each hook's default does nothing."""

    def virtual_axes(self, mesh: Mesh) -> Mapping[str, int]:
        """Return axes that the function is partitioned over and that no mesh has, with their sizes on a mesh."""
        return {}

    def for_layers(self, layers: Mapping[str, int]) -> Request:
        """Return the request for parameters that are layers of stacks: path of each → number of layers in its stack."""
        return self

    def without_schedule(self) -> Request | None:
        """Return the request for a function without a pipeline schedule. None if it is part of the schedule."""
        return self
