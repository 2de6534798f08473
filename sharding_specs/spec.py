"""Sharding spec: the layout of one tensor on a mesh, as data.

Per dim it lists factors, outermost first. A factor is a number n (n unsharded blocks), the sizes of unequal blocks, or
a mesh axis (one block per rank of the axis). `P("data", None)` shards dim 0. `P(("data", "tensor"))` splits one dim
over two axes, the first one major. `P(None, (3, "tensor"))` splits an inner factor, for example of a fused
query-key-value dim. `P(None, ((2, 1, 1), "tensor"))` is for twice as many queries. Each block is split by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from .blocks import Blocks, blocks_of, inside, nested, units
from .errors import SpecError
from .mesh import Mesh
from .notation import parse_dims
from .storage import storages_of

Factor = str | Blocks
Dim: TypeAlias = str | tuple[Factor, ...] | list[Factor] | None


class Placement(NamedTuple):
    """Split by one axis. Each of the outer blocks of the dim is viewed as (ranks of the axis, rest), and so split."""

    axis: str
    dim: int
    outer: Blocks


class P:
    """Layout of a tensor on a mesh.

    >>> P("tensor", None)
    P('tensor')
    >>> P.parse("vocab/tensor embed") == P("tensor", None)
    True
    >>> P.parse("embed (3 heads/tensor dim)")
    P(None, (3, 'tensor'))
    >>> P(((32, 16, 16), "tensor"))
    P(((2, 1, 1), 'tensor'))

    Args:
        dims: per dim None, an axis, or a tuple of axes, numbers and sizes of blocks, the first one major. Sizes are
            relative. Dims that are not listed are unsharded. A tensor must have at least the number of listed dims,
            None included.
        unreduced: axes with partial sums on their ranks.
        reduced: axes with an equal value on their ranks, where its gradient is wanted as partial sums.
        owner: axes along which one rank holds the tensor, with the index of that rank. The other ranks hold nothing.
        padded: size of each sharded dim that its axes may not divide. Each axis, outermost first, splits a block into
            equal parts, and pads the last ones with zeros. For storage layouts, as `P("data", padded={0: 5})`.
        storage: how a rank keeps its shard at rest, by field and word, as in `P("data", memory="host")`. They are those
            of `register_storage`, and memory="device", the default.

    Raises:
        SpecError: when an axis is used twice, a padded dim is not sharded, or a storage is not registered.
    """

    __slots__ = ("_dims", "named", "owner", "padded", "reduced", "storage", "unreduced")

    def __init__(
        self,
        *dims: Dim,
        unreduced: Iterable[str] = (),
        reduced: Iterable[str] = (),
        owner: Mapping[str, int] | None = None,
        padded: Mapping[int, int] | None = None,
        **storage: str,
    ) -> None:
        self._dims = _trimmed(tuple(_factors(dim) for dim in dims))
        self.named = len(dims)  # a tensor must have at least this number of dims; trailing dims may be unsharded
        self.unreduced = frozenset((unreduced,) if isinstance(unreduced, str) else unreduced)
        self.reduced = frozenset((reduced,) if isinstance(reduced, str) else reduced)
        self.owner = dict(sorted(owner.items())) if owner else {}
        self.padded = dict(sorted(padded.items())) if padded else {}
        self.storage = _storage(storage) if storage else {}
        used = [*self._axes(), *self.unreduced, *self.reduced, *self.owner]
        if len(set(used)) < len(used):
            twice = min(axis for axis in used if used.count(axis) > 1)
            raise SpecError(f"{self!r} uses the axis {twice!r} twice; an axis splits at most one dim")
        for dim in self.padded:
            if dim >= len(self._dims) or not self._dims[dim] or not all(isinstance(f, str) for f in self._dims[dim]):
                raise SpecError(f"{self!r} pads dim {dim}, which no axis splits, or only an inner factor of it")
        if self.storage:
            storages_of(self.storage, self)  # raises if one is not registered

    @classmethod
    def parse(cls, text: str, **sizes: int) -> P:
        """Read a spec from its string form: an einops name per dim, with `/axis` after a sharded factor.

        >>> P.parse("batch time/(data,tensor) embed"), P.parse("(2+1+1 heads/tensor dim)")
        (P(None, ('data', 'tensor')), P(((2, 1, 1), 'tensor')))

        Args:
            text: dims separated by spaces, each `name` or `name/axis` or `name/(axis,axis)`, compound dims in
                parentheses, with numbers or sums of sizes as blocks. No dim after `...` may be sharded. The names are
                documentation only.
            sizes: sizes of named factors outside a sharded factor.

        Raises:
            SpecError: when the text cannot be read. The message states the reason.
        """
        try:
            dims = parse_dims(text, sizes)
        except ValueError as error:
            raise SpecError(str(error)) from None
        return cls(*dims)

    @classmethod
    def from_placements(cls, placements: Iterable[Placement], mesh: Mesh, **fields: Any) -> P:
        """Return the spec with these placements on a mesh. Its other fields are the keyword arguments of `P`.

        >>> mesh = Mesh(data=2, tensor=2)
        >>> P.from_placements(P(("data", "tensor"), None).placements(mesh), mesh)
        P(('data', 'tensor'))
        """
        found = sorted(placements, key=lambda placement: (placement.dim, units(placement.outer)))
        dims: list[list[Factor]] = [[] for _ in range(max((p.dim for p in found), default=-1) + 1)]
        reached: dict[int, Blocks] = {}
        for axis, dim, outer in found:
            gap = inside(outer, reached.get(dim, 1))
            if gap is None:
                raise SpecError(f"axis {axis!r} splits {outer} blocks of dim {dim}, which cut across other axes")
            dims[dim] += [gap, axis]
            reached[dim] = nested(outer, mesh.axis_size(axis))
        return cls(*map(tuple, dims), **fields)

    # --- reading ---

    @property
    def dims(self) -> tuple[tuple[Factor, ...], ...]:
        """Factors of each dim, outermost first. Trailing unsharded dims are omitted."""
        return self._dims

    def dim_axes(self) -> tuple[tuple[str, ...], ...]:
        """Return only the axes of each dim."""
        return tuple(tuple(factor for factor in dim if isinstance(factor, str)) for dim in self._dims)

    @property
    def axes(self) -> frozenset[str]:
        """Axes that split a dim."""
        return frozenset(self._axes())

    @property
    def named_axes(self) -> frozenset[str]:
        """All axes that the spec names: axes that split a dim, and axes of partial sums, gradients and owners."""
        return self.axes | self.unreduced | self.reduced | self.owner.keys()

    def _axes(self) -> list[str]:
        return [factor for dim in self._dims for factor in dim if isinstance(factor, str)]

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """Return the split of each axis.

        >>> P(None, (3, "tensor")).placements(Mesh(tensor=2))
        (Placement(axis='tensor', dim=1, outer=3),)
        """
        found = []
        for dim, factors in enumerate(self._dims):
            outer: Blocks = 1
            for factor in factors:
                if isinstance(factor, str):
                    found.append(Placement(factor, dim, outer))
                outer = nested(outer, mesh.axis_size(factor) if isinstance(factor, str) else factor)
        return tuple(found)

    def blocks(self, dim: int, mesh: Mesh) -> dict[str, int]:
        """Return the length of the blocks that each axis of a padded dim splits, outermost first.

        >>> P(("tensor", "data"), padded={0: 6}).blocks(0, Mesh(tensor=2, data=2))
        {'tensor': 6, 'data': 3}
        """
        found, length = dict[str, int](), self.padded[dim]
        for axis in self.dim_axes()[dim]:
            found[axis], length = length, -(-length // mesh.axis_size(axis))
        return found

    @property
    def memory(self) -> str:
        """Memory that a shard is in.

        >>> P("data", memory="device").memory
        'device'
        """
        return self.storage.get("memory", "device")

    # --- deriving ---

    def replace(self, dims: Iterable[Dim] | None = None, **fields: Any) -> P:
        """Return the spec with some fields replaced. They have the names and forms of the attributes.

        >>> P("data", unreduced={"pipe"}).replace([None, "tensor"])
        P(None, 'tensor', unreduced={'pipe'})
        """
        dims, storage = self._dims if dims is None else dims, fields.pop("storage", self.storage)
        return P(*dims, **{**self._fields(), **fields}, **storage)

    def _fields(self) -> dict[str, Any]:
        return {"unreduced": self.unreduced, "reduced": self.reduced, "owner": self.owner, "padded": self.padded}

    def in_compute(self) -> P:
        """Return the spec of the fetched shards, without storage."""
        return self.replace(storage={}) if self.storage else self

    def entered(self) -> P:
        """Return the spec of the shards inside a program, with the storages that they have there."""
        if not self.storage:
            return self
        inside = {name: each.inside for name, each in zip(self.storage, storages_of(self.storage, self), strict=True)}
        return self.replace(storage={name: word for name, word in inside.items() if word})

    def store(self, x: torch.Tensor, since: P | None = None) -> torch.Tensor:
        """Return a shard as a rank keeps it at rest. `since` is a spec with the storages that it already has."""
        held = {} if since is None else since.storage
        for (field, word), each in zip(self.storage.items(), storages_of(self.storage, self), strict=True):
            x = x if held.get(field) == word else each.store(x)
        return x

    def fetch(self, x: torch.Tensor, until: P | None = None) -> torch.Tensor:
        """Return the shard that a rank keeps at rest. The inverse of `store`. `until` has the storages that stay."""
        kept = {} if until is None else until.storage
        for (field, word), each in reversed([*zip(self.storage.items(), storages_of(self.storage, self), strict=True)]):
            x = x if kept.get(field) == word else each.fetch(x)
        return x

    def only(self, axes: Iterable[str]) -> P:
        """Return the spec restricted to `axes`. Other axes are removed from their dims; numbers stay."""
        keep = set(axes)
        if keep >= self.named_axes and self.named == len(self._dims):
            return self
        dims = [tuple(f for f in dim if not isinstance(f, str) or f in keep) for dim in self._dims]
        padded = {dim: size for dim, size in self.padded.items() if any(isinstance(f, str) for f in dims[dim])}
        owner = {axis: rank for axis, rank in self.owner.items() if axis in keep}
        return self.replace(
            dims, unreduced=self.unreduced & keep, reduced=self.reduced & keep, owner=owner, padded=padded
        )

    def fitted(self, shape: Sequence[int], mesh: Mesh) -> P:
        """Return the spec with padding for every dim that its axes do not divide.

        >>> P("data").fitted((5, 3), Mesh(data=2))
        P('data', padded={0: 5})
        """
        uneven = {
            dim: shape[dim]
            for dim, axes in enumerate(self.dim_axes())
            if dim < len(shape) and shape[dim] % mesh.axis_size(axes) and len(axes) == len(self._dims[dim])
        }
        return self if uneven == self.padded and self.named == len(self._dims) else self.replace(padded=uneven)

    def divided(self, further: P, mesh: Mesh) -> P:
        """Return the spec of shards that `further` splits again. On a dim of both, its axes are the inner ones.

        >>> P("tensor").divided(P("data"), Mesh(data=2, tensor=2))
        P(('tensor', 'data'))
        >>> P((3, "tensor")).divided(P((3, "data")), Mesh(data=2, tensor=2))  # a shard has the blocks of the tensor
        P((3, 'tensor', 'data'))
        """
        held = self.placements(mesh)
        outer = {placement.dim: placement.outer for placement in held}
        blocks = {p.dim: nested(p.outer, mesh.axis_size(p.axis)) for p in held}
        placed = [(p, inside(p.outer, outer.get(p.dim, 1)) or p.outer) for p in further.placements(mesh)]
        inner = [p._replace(outer=nested(blocks.get(p.dim, 1), within)) for p, within in placed]
        padded, storage = {**self.padded, **further.padded}, {**self.storage, **further.storage}
        return P.from_placements([*held, *inner], mesh, **{**self._fields(), "padded": padded}, **storage)

    def without(self, axes: Iterable[str]) -> P:
        """Return the spec without `axes`."""
        return self.only(self.named_axes - set(axes))

    def dual(self) -> P:
        """Return the spec of the gradient in a program: `unreduced` and `reduced` are swapped."""
        return self.replace(unreduced=self.reduced, reduced=self.unreduced, storage=self.entered().storage)

    # --- as a value ---

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, P) and self._key() == other._key())

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        owner, padded, storage = tuple(self.owner.items()), tuple(self.padded.items()), tuple(self.storage.items())
        return self._dims, self.unreduced, self.reduced, owner, padded, storage

    def as_written(self) -> str:
        """Return the spec as text, including trailing unsharded dims.

        >>> P("data", None).as_written()
        "P('data', None)"
        """
        return self._text(self.named)

    def __repr__(self) -> str:
        return self._text(len(self._dims))

    def _text(self, count: int) -> str:
        dims = [*self._dims, *[()] * (count - len(self._dims))]
        parts = [repr(dim[0]) if len(dim) == 1 else repr(dim) if dim else "None" for dim in dims]
        for name in ("unreduced", "reduced"):
            if axes := sorted(getattr(self, name)):  # sorted: the order of a set differs between processes
                parts.append(f"{name}={{{', '.join(map(repr, axes))}}}")
        parts += [f"{name}={held}" for name in ("owner", "padded") if (held := getattr(self, name))]
        parts += [f"{field}={word!r}" for field, word in self.storage.items()]
        return f"P({', '.join(parts)})"

    def __str__(self) -> str:
        """Return the string form of the dims. `P.parse` can read it unless a number is between two axes of one dim."""
        return " ".join(_dim_text(f"d{index}", dim) for index, dim in enumerate(self._dims))


def as_spec(spec: P | str | None) -> P:
    """Convert a spec, its string form, or None (replicated) to a spec.

    >>> as_spec("vocab/tensor embed"), as_spec(None)
    (P('tensor'), P())

    Args:
        spec: a spec, a string or None.

    Raises:
        SpecError: for any other value, or a string that cannot be read.
    """
    if isinstance(spec, P):
        return spec
    if spec is None:
        return P()
    if isinstance(spec, str):
        return P.parse(spec)
    raise SpecError(f"a sharding spec is a P(…), a string like 'vocab/tensor embed', or None; not {spec!r}")


def _storage(words: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(each for each in words.items() if each != ("memory", "device")))


def _factors(dim: Dim) -> tuple[Factor, ...]:
    if dim is None:
        return ()
    factors = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    for factor in factors:
        sizes = [] if isinstance(factor, str) else factor if isinstance(factor, (tuple, list)) and factor else [factor]
        if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes):
            raise SpecError(
                "a dim must be None, an axis name, or a tuple of axis names, numbers, and tuples of sizes of blocks; "
                f"got {dim!r}"
            )
    kept = [blocks_of(factor) if isinstance(factor, (tuple, list)) else factor for factor in factors]
    while kept and not isinstance(kept[-1], str):  # blocks inside the last axis have no effect
        kept.pop()
    return tuple(factor for factor in kept if factor != 1)


def _trimmed(dims: tuple[tuple[Factor, ...], ...]) -> tuple[tuple[Factor, ...], ...]:
    length = len(dims)
    while length and not dims[length - 1]:
        length -= 1
    return dims[:length]


def _dim_text(name: str, factors: tuple[Factor, ...]) -> str:
    if all(isinstance(factor, str) for factor in factors):
        return _suffixed(name, factors)
    texts: list[str] = []
    for sharded, group in itertools.groupby(factors, key=lambda factor: isinstance(factor, str)):
        part = tuple(group)
        plain = ("+".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in part)
        texts += [_suffixed(f"{name}x{len(texts)}", part)] if sharded else plain
    return f"({' '.join(texts)} {name})"


def _suffixed(name: str, axes: tuple[Factor, ...]) -> str:
    return name if not axes else f"{name}/{axes[0]}" if len(axes) == 1 else f"{name}/({','.join(map(str, axes))})"
