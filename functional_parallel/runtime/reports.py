"""What errors of collectives say: who did what, over which axes, and whom it waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from sharding_specs import Mesh

from .algorithms import Packed
from .pending import CollectiveError

__all__ = ["described", "first_use"]


def described(
    mesh: Mesh, rank: int, operation: str, x: Tensor | Packed, axes: tuple[str, ...], ranks: Sequence[int]
) -> Callable[[float], str]:
    """The sentence for a collective of this rank that failed after so many seconds."""
    shape, dtype = list(x.shape), str(x.dtype).removeprefix("torch.")

    def describe(seconds: float) -> str:
        return (
            f"{_called(mesh, rank)}: {operation} over {axes} of {dtype}{shape} failed after "
            f"{seconds:.1f} s. A timeout means that another rank of {list(ranks)} never came to it."
        )

    return describe


@contextmanager
def first_use(mesh: Mesh, rank: int, axes: tuple[str, ...], ranks: Sequence[int]) -> Iterator[None]:
    """Where the ranks of a group meet and measure it, if they have not: what fails there says so."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        raise CollectiveError(
            f"{_called(mesh, rank)}: the first collective over {axes}, in which its ranks find and measure each other, "
            f"failed after {time.monotonic() - began:.1f} s. Another rank of {list(ranks)} died, or never came to it. "
            f"torch says: {error}"
        ) from error


def _called(mesh: Mesh, rank: int) -> str:
    coordinates = ", ".join(f"{axis}={index}" for axis, index in mesh.coordinates(rank).items())
    return f"rank {rank} ({coordinates})"
