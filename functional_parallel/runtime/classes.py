"""Classes of ranks that hold the same value, because it does not vary along some axes: computed once for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import fx

from sharding_specs import Mesh, P

from ..ir import AxisSet, varied_axes

Jobs = list[tuple[tuple[int, ...], list[tuple[int, int]]]]


class RankClasses:
    def __init__(self, mesh: Mesh, deduplicate: bool = True) -> None:
        self.mesh = mesh
        self.all_axes: AxisSet = frozenset(name for name in mesh.axis_names if mesh.axis_size(name) > 1)
        self.deduplicate = deduplicate
        self._representatives: dict[AxisSet, list[int]] = {}
        self._groups: dict[tuple[str, ...], dict[int, list[int]]] = {}
        self._picks: dict[tuple[AxisSet, AxisSet], list[int]] = {}
        self._jobs: dict[tuple[tuple[str, ...], AxisSet, AxisSet], Jobs] = {}

    def of_spec(self, spec: P) -> AxisSet:
        return self.all_axes & (spec.axes | spec.unreduced) if self.deduplicate else self.all_axes

    def representatives(self, axes: AxisSet) -> list[int]:
        if axes not in self._representatives:
            names = [name for name in self.mesh.axis_names if name in axes]
            sizes = (range(self.mesh.axis_size(name)) for name in names)
            found = [self.mesh.rank(dict(zip(names, index, strict=True))) for index in itertools.product(*sizes)]
            self._representatives[axes] = found
        return self._representatives[axes]

    def index(self, rank: int, axes: AxisSet) -> int:
        return self.mesh.axis_index(rank, [name for name in self.mesh.axis_names if name in axes])

    def picks(self, wanted: AxisSet, held: AxisSet) -> list[int]:
        """Return, for each class over `wanted`, the index of its ranks' class over `held`."""
        if (wanted, held) not in self._picks:
            self._picks[wanted, held] = [self.index(rank, held) for rank in self.representatives(wanted)]
        return self._picks[wanted, held]

    def group(self, rank: int, axes: tuple[str, ...]) -> list[int]:
        if axes not in self._groups:
            self._groups[axes] = {member: members for members in self.mesh.groups(axes) for member in members}
        return self._groups[axes][rank]

    def jobs(self, axes: tuple[str, ...], made: AxisSet, held: AxisSet) -> Jobs:
        """Return the work of a collective: per group, the classes of its operands and the class of each result."""
        key = (axes, made, held)
        if key not in self._jobs:
            found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
            for position, rank in enumerate(self.representatives(made)):
                members = self.group(rank, axes)
                inputs = tuple(self.index(member, held) for member in members)
                found.setdefault(inputs, []).append((members.index(rank), position))
            self._jobs[key] = list(found.items())
        return self._jobs[key]

    def of_node(self, node: fx.Node, operands: Iterable[AxisSet]) -> AxisSet:
        if not self.deduplicate:
            return self.all_axes
        return varied_axes(node, operands) & self.all_axes
