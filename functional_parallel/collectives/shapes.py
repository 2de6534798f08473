"""Shapes of the results of collectives, and errors for dims that do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import CollectiveShapeError
from .axes import axis_size


def canonical_dim(operation: str, shape: Sequence[int], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        has = (
            f"the operand of shape {tuple(shape)} has dims 0 … {len(shape) - 1}" if shape else "the operand is a scalar"
        )
        raise CollectiveShapeError(f"{operation}: there is no dim {dim}; {has}")
    return dim % len(shape)


def chunk_shape(operation: str, shape: Sequence[int], dim: int, axes: Sequence[str]) -> tuple[int, ...]:
    ranks = axis_size(axes)
    if shape[dim] % ranks:
        raise CollectiveShapeError(
            f"{operation} over {_named(axes)}: dim {dim} of the operand of shape {tuple(shape)} has size {shape[dim]}, "
            f"which {ranks} ranks do not divide; pad it to {-(-shape[dim] // ranks) * ranks} or split another dim"
        )
    return (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])


def gathered_shape(operation: str, shape: Sequence[int], dim: int, axes: Sequence[str]) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] * axis_size(axes), *shape[dim + 1 :])


def checked_rank(operation: str, what: str, rank: int, axes: Sequence[str]) -> int:
    ranks = axis_size(axes)
    if not 0 <= rank < ranks:
        raise CollectiveShapeError(
            f"{operation} over {_named(axes)}: {what} {rank} does not exist; there are ranks 0 … {ranks - 1}"
        )
    return rank


def checked_pairs(operation: str, pairs: Iterable[tuple[int, int]], axes: Sequence[str]) -> list[int]:
    """Check that no rank repeats, and flatten `[(source, target), ...]` to `[source, target, ...]`."""
    pairs = [(int(source), int(target)) for source, target in pairs]
    for position, what in enumerate(("source", "target")):
        ranks = [checked_rank(operation, what, pair[position], axes) for pair in pairs]
        repeated = sorted({rank for rank in ranks if ranks.count(rank) > 1})
        if repeated:
            raise CollectiveShapeError(
                f"{operation} over {_named(axes)}: rank {repeated[0]} is the {what} of more than one pair in {pairs}; "
                "sources and targets must be unique, so send in several steps"
            )
    return [rank for pair in pairs for rank in pair]


def _named(axes: Sequence[str]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
