"""Mesh of ranks along named axes, the first axis outermost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

from .errors import MeshError

AxisNames = str | Iterable[str]


class Mesh:
    """Ranks along named axes. Rank 0 has coordinate 0 on every axis. The last axis varies fastest.

    >>> mesh = Mesh(data=2, tensor=2)
    >>> mesh, mesh.size, mesh.coordinates(2)
    (Mesh(data=2, tensor=2), 4, {'data': 1, 'tensor': 0})
    >>> mesh.groups("data")
    [[0, 2], [1, 3]]

    Args:
        axes: mapping from axis name to number of ranks, outermost first.
        ranks: the global rank of each process of the mesh, if it is on part of the processes only.
        more: additional axes as keywords. One size may be -1, for the rest of the world size; see `resolve`.

    Raises:
        MeshError: for a name that is not an identifier, a size that is not a positive integer or -1, or a second -1.
            Also for `ranks` that are not ascending, or not as many as the sizes.
    """

    __slots__ = ("_ranks", "_shape")

    def __init__(
        self, axes: Mapping[str, int] | None = None, /, *, ranks: Sequence[int] | None = None, **more: int
    ) -> None:
        self._shape = {**(axes or {}), **more}
        self._ranks = None if ranks is None else tuple(ranks)
        for name, size in self._shape.items():
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"{name!r} cannot name a mesh axis; take an identifier, 'data'")
            if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
                raise MeshError(f"mesh axis {name!r} has size {size!r}; give a positive number, or -1 for the rest")
        if list(self._shape.values()).count(-1) > 1:
            raise MeshError(f"only one axis can take the rest of the ranks, but {self!r} has several -1")
        if self._ranks is not None and (
            len(self._ranks) != self.size or [*self._ranks] != sorted({*self._ranks}) or self._ranks[0] < 0
        ):
            raise MeshError(f"{self!r} has {self.size} ranks; list the global rank of each, in ascending order")

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read a mesh from text.

        >>> Mesh.parse("data=2,tensor=2")
        Mesh(data=2, tensor=2)

        Args:
            text: `axis=size` pairs separated by commas; empty for one rank.

        Raises:
            MeshError: for a pair that cannot be read or a repeated axis. The message names it.
        """
        axes: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, size = (piece.strip() for piece in part.partition("="))
            if not equals or not name.isidentifier() or not size.lstrip("-").isdigit():
                raise MeshError(f"cannot read {part!r} in mesh {text!r}; write axis=size pairs, 'data=2,tensor=2'")
            if name in axes:
                raise MeshError(f"axis {name!r} appears twice in mesh {text!r}")
            axes[name] = int(size)
        return cls(axes)

    def resolve(self, world_size: int) -> Mesh:
        """Return the mesh with -1 replaced by the world size divided by the other axes.

        >>> Mesh(data=-1, tensor=2).resolve(8)
        Mesh(data=4, tensor=2)
        """
        if self._ranks is not None:
            if self._ranks[-1] >= world_size:
                raise MeshError(f"{self!r} names rank {self._ranks[-1]}, but there are {world_size}")
            return self
        known = math.prod(size for size in self._shape.values() if size != -1)
        if -1 in self._shape.values():
            if world_size % known:
                raise MeshError(
                    f"{self!r} on {world_size} ranks: the other axes take {known}, which does not divide that"
                )
            return Mesh({name: world_size // known if size == -1 else size for name, size in self._shape.items()})
        if known != world_size:
            raise MeshError(f"{self!r} has {known} ranks, but there are {world_size}; change a size, or give one as -1")
        return self

    # --- shape ---

    @property
    def shape(self) -> dict[str, int]:
        """Axis sizes by name, outermost first."""
        if -1 in self._shape.values():
            raise MeshError(f"{self!r} is not resolved; call .resolve(world_size) first")
        return dict(self._shape)

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes, outermost first.

        >>> Mesh(data=2, tensor=4).axes
        ('data', 'tensor')
        """
        return tuple(self._shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first, by the name that JAX gives them."""
        return self.axes

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape.values())

    @property
    def ranks(self) -> range:
        """All ranks in order."""
        return range(self.size)

    @property
    def is_partial(self) -> bool:
        """Whether the mesh names its processes, so that there may be others."""
        return self._ranks is not None

    @property
    def processes(self) -> Sequence[int]:
        """Global rank of the process of each rank.

        >>> Mesh(data=2, ranks=[1, 3]).processes
        (1, 3)
        """
        return self.ranks if self._ranks is None else self._ranks

    def axis_size(self, axes: AxisNames) -> int:
        """Return the number of ranks along an axis, or the product over several axes.

        >>> Mesh(data=2, tensor=4).axis_size(("data", "tensor"))
        8
        """
        return math.prod(self.shape[name] for name in self._named(axes))

    # --- coordinates ---

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's index along each axis."""
        if rank not in self.ranks:
            raise MeshError(f"rank {rank} is not on {self!r}, which has ranks 0 to {self.size - 1}")
        found: dict[str, int] = {}
        for name in reversed(self.axis_names):
            rank, found[name] = divmod(rank, self._shape[name])
        return {name: found[name] for name in self.axis_names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at these coordinates. A missing axis counts as 0.

        >>> Mesh(data=2, tensor=2).rank({"data": 1, "tensor": 1})
        3
        """
        self._named(coordinates)
        rank = 0
        for name, size in self.shape.items():
            index = coordinates.get(name, 0)
            if not 0 <= index < size:
                raise MeshError(f"coordinate {name}={index} lies outside {self!r}")
            rank = rank * size + index
        return rank

    def axis_index(self, rank: int, axes: AxisNames) -> int:
        """Return a rank's index along an axis, or along several axes, the first named one major.

        >>> Mesh(data=2, tensor=2).axis_index(2, ("tensor", "data"))
        1
        """
        coordinates = self.coordinates(rank)
        index = 0
        for name in self._named(axes):
            index = index * self._shape[name] + coordinates[name]
        return index

    def groups(self, axes: AxisNames) -> list[list[int]]:
        """Return the groups of ranks that differ only along `axes`, each in the order of the index along them.

        >>> Mesh(data=2, tensor=2).groups(("data", "tensor"))
        [[0, 1, 2, 3]]
        """
        named = self._named(axes)
        others = [name for name in self.axis_names if name not in named]
        groups = []
        for fixed in itertools.product(*(range(self.shape[name]) for name in others)):
            along = itertools.product(*(range(self.shape[name]) for name in named))
            base = dict(zip(others, fixed, strict=True))
            groups.append([self.rank({**base, **dict(zip(named, index, strict=True))}) for index in along])
        return groups

    def _named(self, axes: AxisNames) -> tuple[str, ...]:
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for name in names:
            if name not in self._shape:
                known = ", ".join(self.axis_names) or "none"
                raise MeshError(f"{self!r} has no axis {name!r}; its axes are: {known}")
            if names.count(name) > 1:
                raise MeshError(f"axis {name!r} is named twice in {names!r}; name each axis once")
        return names

    # --- as a value ---

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[tuple[tuple[str, int], ...], tuple[int, ...] | None]:
        return tuple(self._shape.items()), self._ranks

    def __repr__(self) -> str:
        fields = [f"{name}={size}" for name, size in self._shape.items()]
        return f"Mesh({', '.join(fields if self._ranks is None else [*fields, f'ranks={list(self._ranks)}'])})"

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self._shape.items()) or "one rank"
