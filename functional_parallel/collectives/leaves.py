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


def emit_leaves(operation: str, tree: Tree, axis: Axes, *, numbers: bool = False, **params: Any) -> Tree:
    """Apply a primitive to the tensors of a pytree, with checked dims and ranks. Numbers, if allowed, stay."""

    def leaf(value: Any, axes: tuple[str, ...]) -> Leaf:
        if isinstance(value, NUMBERS):
            return value
        checked = {name: _checked(operation, value, axes, name, each) for name, each in params.items()}
        return checked_emit(operation, value, axes, **checked)

    return over_leaves(operation, leaf, tree, axis, numbers)


def _checked(operation: str, x: Tensor, axes: tuple[str, ...], name: str, value: Any) -> Param:
    if name == "source":
        return shapes.checked_rank(operation, name, value, axes)
    if name == "pairs":
        return shapes.checked_pairs(operation, value, axes)
    if name == "concat_dim" or (name == "dim" and operation == "all_gather"):
        return shapes.canonical_dim(operation, x.shape, value)
    return split_dim_of(operation, x, value, axes) if name in ("dim", "split_dim") else str(value)


def checked_emit(operation: str, x: Tensor, axes: tuple[str, ...], **params: Param) -> Tensor:
    for axis in axes:
        communicator = communicator_for(operation, (axis,))
        if isinstance(communicator, Lane):
            result_type(operation, Type({axis: _known_state(x, communicator, params)}), (axis,), **params)
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
