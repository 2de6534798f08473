"""A sharding spec: how one tensor lies on a mesh, as data.

Per dim it lists factors, outermost first. A factor is a number (that many blocks, unsharded) or a mesh axis (as many
blocks as the axis has ranks, one per rank). `P("data", None)` shards dim 0; `P(("data", "tensor"))` splits one dim by
two axes, the first major; `P(None, (3, "tensor"))` splits an inner factor, as a fused query-key-value dim needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .mesh import Mesh
from .notation import parse_dims

__all__ = ["P", "Placement", "SpecError", "as_spec"]

Factor = str | int


class SpecError(ValueError):
    """A spec that does not read, or does not fit the tensors it is for; lists every one."""


class Placement(NamedTuple):
    """One axis's part of a spec: the dim is viewed as (outer, ranks of the axis, rest), cut in the middle."""

    axis: str
    dim: int
    outer: int


class P:
    """How a tensor lies on a mesh.

    >>> P("tensor", None)
    P('tensor')
    >>> P.parse("vocab/tensor embed") == P("tensor", None)
    True
    >>> P.parse("embed (3 heads/tensor dim)")
    P(None, (3, 'tensor'))

    Args:
        dims: per dim None, an axis, or a tuple of axes and numbers, the first major. Dims not mentioned are unsharded.
            A tensor must have at least as many dims as are mentioned, None included.
        unreduced: axes along which ranks hold partial sums.
        reduced: axes along which ranks hold the same value and its gradient is wanted as partial sums.
        padded: sharded dims that their axes need not divide, with their length: ranks hold them filled up with zeros.
            For what lies at rest, `P("data", padded={0: 5})`.

    Raises:
        SpecError: when an axis is used twice, or a padded dim is not sharded.
    """

    __slots__ = ("_dims", "named", "padded", "reduced", "unreduced")

    def __init__(
        self,
        *dims: Any,
        unreduced: Iterable[str] = (),
        reduced: Iterable[str] = (),
        padded: Mapping[int, int] | None = None,
    ) -> None:
        self._dims = _trimmed(tuple(_factors(dim) for dim in dims))
        self.named = len(dims)  # a tensor must have that many dims; those at the end may be unsharded
        self.unreduced = frozenset((unreduced,) if isinstance(unreduced, str) else unreduced)
        self.reduced = frozenset((reduced,) if isinstance(reduced, str) else reduced)
        self.padded = dict(sorted((padded or {}).items()))
        used = [*self._axes(), *self.unreduced, *self.reduced]
        twice = sorted({axis for axis in used if used.count(axis) > 1})
        if twice:
            raise SpecError(f"{self!r} uses the axis {twice[0]!r} twice; an axis splits at most one dim")
        for dim in self.padded:
            if dim >= len(self._dims) or not self._dims[dim] or any(isinstance(f, int) for f in self._dims[dim]):
                raise SpecError(f"{self!r} pads dim {dim}, which no axis splits, or only an inner factor of it")

    @classmethod
    def parse(cls, text: str, **sizes: int) -> P:
        """Read a spec from its string form: einops names per dim, `/axis` where a factor is sharded.

        >>> P.parse("batch time/(data,tensor) embed")
        P(None, ('data', 'tensor'))

        Args:
            text: dims separated by spaces, each `name` or `name/axis` or `name/(axis,axis)`, compound dims in
                parentheses; after `...` nothing may be sharded. Names only document.
            sizes: sizes of named factors that stand outside a sharded one.

        Raises:
            SpecError: saying what does not read.
        """
        try:
            dims = parse_dims(text, sizes)
        except ValueError as error:
            raise SpecError(str(error)) from None
        return cls(*dims)

    @classmethod
    def from_placements(
        cls,
        placements: Iterable[Placement],
        mesh: Mesh,
        unreduced: Iterable[str] = (),
        reduced: Iterable[str] = (),
        padded: Mapping[int, int] | None = None,
    ) -> P:
        """The spec whose placements on a mesh are these.

        >>> mesh = Mesh(data=2, tensor=2)
        >>> P.from_placements(P(("data", "tensor"), None).placements(mesh), mesh)
        P(('data', 'tensor'))
        """
        found = sorted(placements, key=lambda placement: (placement.dim, placement.outer))
        dims: list[list[Factor]] = [[] for _ in range(max((p.dim for p in found), default=-1) + 1)]
        reached: dict[int, int] = {}
        for axis, dim, outer in found:
            gap, rest = divmod(outer, reached.get(dim, 1))
            if rest:
                raise SpecError(f"axis {axis!r} splits {outer} blocks of dim {dim}, which cut across other axes")
            if gap > 1:
                dims[dim].append(gap)
            dims[dim].append(axis)
            reached[dim] = outer * mesh.axis_size(axis)
        return cls(*map(tuple, dims), unreduced=unreduced, reduced=reduced, padded=padded)

    # --- reading ---

    @property
    def dims(self) -> tuple[tuple[Factor, ...], ...]:
        """Per dim its factors, outermost first; trailing unsharded dims are left out."""
        return self._dims

    def dim_axes(self) -> tuple[tuple[str, ...], ...]:
        """Per dim the axes alone."""
        return tuple(tuple(factor for factor in dim if isinstance(factor, str)) for dim in self._dims)

    @property
    def axes(self) -> frozenset[str]:
        """The axes that split a dim."""
        return frozenset(self._axes())

    def _axes(self) -> list[str]:
        return [factor for dim in self._dims for factor in dim if isinstance(factor, str)]

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """Per axis, where it splits.

        >>> P(None, (3, "tensor")).placements(Mesh(tensor=2))
        (Placement(axis='tensor', dim=1, outer=3),)
        """
        found = []
        for dim, factors in enumerate(self._dims):
            outer = 1
            for factor in factors:
                if isinstance(factor, str):
                    found.append(Placement(factor, dim, outer))
                    outer *= mesh.axis_size(factor)
                else:
                    outer *= factor
        return tuple(found)

    # --- deriving ---

    def replace(
        self,
        dims: Iterable[Any] | None = None,
        *,
        unreduced: Iterable[str] | None = None,
        reduced: Iterable[str] | None = None,
        padded: Mapping[int, int] | None = None,
    ) -> P:
        """Return the spec with some fields changed; every other field is kept.

        >>> P("data", unreduced={"pipe"}).replace([None, "tensor"])
        P(None, 'tensor', unreduced={'pipe'})

        Args:
            dims: the new dims, as for `P`.
            unreduced: the new axes with partial sums.
            reduced: the new axes whose gradient is wanted as partial sums.
            padded: the new padded dims with their lengths.

        Raises:
            SpecError: when the fields do not fit together.
        """
        return P(
            *(self._dims if dims is None else dims),
            unreduced=self.unreduced if unreduced is None else unreduced,
            reduced=self.reduced if reduced is None else reduced,
            padded=self.padded if padded is None else padded,
        )

    def only(self, axes: Iterable[str]) -> P:
        """What the spec says of some axes alone. Axes on the same dim that are dropped leave no trace."""
        keep = set(axes)
        dims = [tuple(f for f in dim if isinstance(f, int) or f in keep) for dim in self._dims]
        padded = {dim: size for dim, size in self.padded.items() if any(isinstance(f, str) for f in dims[dim])}
        return self.replace(dims, unreduced=self.unreduced & keep, reduced=self.reduced & keep, padded=padded)

    def fitted(self, shape: Sequence[int], mesh: Mesh) -> P:
        """The spec with every dim padded that its axes do not divide.

        >>> P("data").fitted((5, 3), Mesh(data=2))
        P('data', padded={0: 5})
        """
        uneven = {
            dim: shape[dim]
            for dim, axes in enumerate(self.dim_axes())
            if dim < len(shape) and shape[dim] % mesh.axis_size(axes) and len(axes) == len(self._dims[dim])
        }
        return self.replace(padded=uneven)

    def divided(self, further: P, mesh: Mesh) -> P:
        """The spec of parts that another one divides further: on a dim of both, its axes are the inner ones.

        >>> P("tensor").divided(P("data"), Mesh(data=2, tensor=2))
        P(('tensor', 'data'))
        """
        held = self.placements(mesh)
        blocks = {placement.dim: placement.outer * mesh.axis_size(placement.axis) for placement in held}
        inside = [p._replace(outer=p.outer * blocks.get(p.dim, 1)) for p in further.placements(mesh)]
        padded = {**self.padded, **further.padded}
        return P.from_placements([*held, *inside], mesh, self.unreduced, self.reduced, padded)

    def without(self, axes: Iterable[str]) -> P:
        """The spec without some axes."""
        return self.only((self.axes | self.unreduced | self.reduced) - set(axes))

    def dual(self) -> P:
        """How the gradient of such a value lies: Unreduced and Reduced change places."""
        return self.replace(unreduced=self.reduced, reduced=self.unreduced)

    # --- as a value ---

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return (self._dims, self.unreduced, self.reduced, tuple(self.padded.items()))

    def as_written(self) -> str:
        """The spec as text, with the unsharded dims at its end.

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
            if axes := sorted(getattr(self, name)):  # sorted: a set prints in an order of its own in every process
                parts.append(f"{name}={{{', '.join(map(repr, axes))}}}")
        if self.padded:
            parts.append(f"padded={self.padded}")
        return f"P({', '.join(parts)})"

    def __str__(self) -> str:
        """The string form of the dims; `P.parse` reads it again, unless a number stands between axes of one dim."""
        return " ".join(_dim_text(f"d{index}", dim) for index, dim in enumerate(self._dims))


def as_spec(spec: P | str | None) -> P:
    """A spec, from a spec, its string form, or None (whole).

    >>> as_spec("vocab/tensor embed"), as_spec(None)
    (P('tensor'), P())

    Args:
        spec: what stands for a spec.

    Raises:
        SpecError: for anything else, or a string form that does not read.
    """
    if isinstance(spec, P):
        return spec
    if spec is None:
        return P()
    if isinstance(spec, str):
        return P.parse(spec)
    raise SpecError(f"a sharding spec is a P(…), a string like 'vocab/tensor embed', or None; not {spec!r}")


def _factors(dim: Any) -> tuple[Factor, ...]:
    if dim is None:
        return ()
    factors = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    for factor in factors:
        if not isinstance(factor, (str, int)) or isinstance(factor, bool) or (isinstance(factor, int) and factor < 1):
            raise SpecError(f"a dim is None, an axis name, or a tuple of axis names and numbers; not {dim!r}")
    kept = list(factors)
    while kept and isinstance(kept[-1], int):  # blocks inside the last axis say nothing
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
        texts += [_suffixed(f"{name}x{len(texts)}", part)] if sharded else map(str, part)
    return f"({' '.join(texts)} {name})"


def _suffixed(name: str, axes: tuple[Factor, ...]) -> str:
    return name if not axes else f"{name}/{axes[0]}" if len(axes) == 1 else f"{name}/({','.join(map(str, axes))})"
