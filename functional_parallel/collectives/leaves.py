"""Helpers of all public collectives: map over a pytree, and check the known states before a primitive is applied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import optree
from torch import Tensor

from sharding_specs import register_dataclasses

from . import primitives, shapes
from .axes import Axes, communicator_for, normalize_axes
from .communicator import Lane
from .types import Param, State, Type, result_type
from .vmap import is_mapped

Tree = TypeVar("Tree")
NUMBERS = (bool, int, float, complex)
Leaf = Tensor | complex  # a tensor or any number


def over_leaves(
    operation: str, leaf: Callable[[Any, tuple[str, ...]], Leaf], tree: Tree, axis: Axes, numbers: bool = False
) -> Tree:
    axes = normalize_axes(axis)
    for name in axes:
        communicator_for(operation, (name,))

    def visit(value: Any) -> Leaf:
        if isinstance(value, Tensor) or (numbers and isinstance(value, NUMBERS)):
            return leaf(value, axes)
        raise TypeError(
            f"{operation} over {axes}: a leaf is {value!r} of type {type(value).__name__}, but must be a tensor; "
            "wrap it in torch.tensor, or keep it out of the pytree"
        )

    register_dataclasses(tree)
    mapped: Tree = optree.tree_map(visit, tree)
    return mapped


def checked_emit(operation: str, x: Tensor, axes: tuple[str, ...], **params: Param) -> Tensor:
    for axis in axes:
        carrier = communicator_for(operation, (axis,))
        if isinstance(carrier, Lane):
            result_type(operation, Type({axis: _known_state(x, carrier, params)}), (axis,), **params)
    return primitives.apply_primitive(operation, x, axes, *params.values())


def _known_state(x: Tensor, lane: Lane, params: dict[str, Param]) -> State:
    # Reduced is taken from the caller's `src`.
    if is_mapped(x, lane):
        return State.VARYING
    return State.REDUCED if params.get("src") == "reduced" else State.INVARIANT


def split_dim_of(operation: str, x: Tensor, dim: int, axes: tuple[str, ...]) -> int:
    dim = shapes.canonical_dim(operation, x.shape, dim)
    shapes.chunk_shape(operation, x.shape, dim, axes)
    return dim
