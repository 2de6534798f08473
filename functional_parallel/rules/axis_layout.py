"""Layout of one value along the mesh axis that is being partitioned: replicated, sharded, or partial sums."""

from __future__ import annotations

from dataclasses import dataclass

from sharding_specs.blocks import Blocks

from ..collectives import DimSplit


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the full value (the state Invariant)."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Reduced:
    """Every rank holds the full value, and its gradient is wanted as partial sums (the state Reduced)."""

    def __str__(self) -> str:
        return "replicated, its gradient unreduced"


@dataclass(frozen=True)
class Partial:
    """Each rank holds a summand of the value (the state Unreduced)."""

    def __str__(self) -> str:
        return "partial sums"


@dataclass(frozen=True)
class Shard:
    """Each rank holds a slice of the value (the state Varying).

    The dim is viewed as (outer, ranks, rest), and a rank holds its index of the middle factor. `outer` is more than one
    in two cases: dims outside the sharded dim were merged into it, `"(b heads/tensor) s t"`, or a spec shards an inner
    factor. It is a tuple for a spec of unequal blocks: each block is viewed as (ranks, rest).
    """

    dim: int
    outer: Blocks = 1

    def __str__(self) -> str:
        return f"sharded on dim {self.dim}" + (f" inside a factor of {self.outer}" if self.outer != 1 else "")


@dataclass(frozen=True)
class Owned:
    """One rank holds the full value, and the others hold nothing (the state Owned)."""

    rank: int

    def __str__(self) -> str:
        return f"owned by rank {self.rank}"


AxisLayout = Replicated | Reduced | Partial | Shard | Owned
REPLICATED = Replicated()
REDUCED = Reduced()
PARTIAL = Partial()


def shard_shape(shape: tuple[int, ...], place: AxisLayout, parts: DimSplit) -> tuple[int, ...]:
    if not isinstance(place, Shard):
        return tuple(shape)
    return (*shape[: place.dim], parts.local(shape[place.dim]), *shape[place.dim + 1 :])
