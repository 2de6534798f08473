"""Which ranks of a mesh hold different values of what: the classes that simulation computes once each.

A value that does not vary along an axis is the same on all its ranks, so it is computed once for them. A class is the
coordinates of a rank on the axes along which the value varies.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import fx

from sharding_specs import Mesh, P

from ..program.variation import Axes, varied_axes

__all__ = ["Classes"]


class Classes:
    """Numbers the classes of a mesh for every set of axes."""

    def __init__(self, mesh: Mesh, deduplicate: bool = True) -> None:
        self.mesh = mesh
        self.all_axes: Axes = frozenset(name for name in mesh.axis_names if mesh.axis_size(name) > 1)
        self.deduplicate = deduplicate
        self._representatives: dict[Axes, list[int]] = {}

    def of_spec(self, spec: P) -> Axes:
        """The axes along which a value with this spec varies."""
        return self.all_axes & (spec.axes | spec.unreduced) if self.deduplicate else self.all_axes

    def representatives(self, axes: Axes) -> list[int]:
        """One rank per class, in order."""
        if axes not in self._representatives:
            names = [name for name in self.mesh.axis_names if name in axes]
            sizes = (range(self.mesh.axis_size(name)) for name in names)
            found = [self.mesh.rank(dict(zip(names, index, strict=True))) for index in itertools.product(*sizes)]
            self._representatives[axes] = found
        return self._representatives[axes]

    def index(self, rank: int, axes: Axes) -> int:
        """The class that a rank belongs to."""
        coordinates = self.mesh.coordinates(rank)
        number = 0
        for name in self.mesh.axis_names:
            if name in axes:
                number = number * self.mesh.axis_size(name) + coordinates[name]
        return number

    def of_node(self, node: fx.Node, operands: Iterable[Axes]) -> Axes:
        """The axes along which a node's result varies, from those of its operands."""
        if not self.deduplicate:
            return self.all_axes
        return varied_axes(node, operands) & self.all_axes
