"""A training state as the leaves of a checkpoint, and back.

The leaves are those of the user's trees: full parameters, the optimizer's state, and what requests add to it. The state
itself holds them in another form. The map between both is found by the functions that `train.whole` uses, applied to
tensors without values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch

from ..checkpoint import LeafLayout, Piece, Vector, tree_keys
from ..functions import PyTree
from ..ir import TensorSignature
from ..runtime import Where
from ..stateful import leaf_layout
from .states import States
from .train_state import StateLayout
from .update import FlatPacking


@dataclass(frozen=True)
class SavedLeaves:
    """The leaves of a checkpoint of a state.

    Args:
        tensors: the tensors.
        rounded: stored layouts of the stored parameters with only masters in the checkpoint.
        numbers: indices of the held leaves that are not tensors, by kind and key.
        params: the tree of the user's parameters, of tensors without values.
        owners: key of the parameter that a leaf belongs to, by kind and key of the leaf.
        frozen: shapes of the parameters that the optimizer does not update, by key.
    """

    tensors: tuple[LeafLayout, ...]
    rounded: tuple[LeafLayout, ...]
    numbers: dict[str, int]
    params: PyTree
    owners: dict[str, str]
    frozen: dict[str, tuple[int, ...]]


@dataclass
class _Constant:
    """Stands for a held leaf that is not a tensor."""

    index: int


class _Origin(NamedTuple):
    """Position of a full tensor of the user's trees: in one held tensor, in one per row, or in a vector."""

    held: tuple[int, ...]
    number: int | None = None  # of the parameter in a vector
    is_stack: bool = False


class _Markers:
    """Tensors without values that stand for the held tensors of a state, and for the user's tensors in them."""

    def __init__(self, layout: StateLayout) -> None:
        self.layout, self._sources, self._alive = layout, dict[int, _Origin](), list[torch.Tensor]()

    def new(self, shape: Any, dtype: torch.dtype, source: _Origin) -> torch.Tensor:
        made = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._alive.append(made)
        self._sources[id(made)] = source
        return made

    def source(self, marker: torch.Tensor) -> _Origin:
        return self._sources[id(marker)]

    def of_vector(self, vector: Any, number: int) -> Any:
        if not isinstance(vector, torch.Tensor):
            return vector
        packing = self.layout.layouts.packing
        assert isinstance(packing, FlatPacking)
        shape = packing.shapes[number]
        return self.new(shape, vector.dtype, _Origin(self.source(vector).held, number))

    def join(self, layers: list[Any]) -> Any:
        if not layers or not isinstance(layers[0], torch.Tensor):
            return layers[0]
        held = tuple(index for layer in layers for index in self.source(layer).held)
        return self.new((len(layers), *layers[0].shape), layers[0].dtype, _Origin(held, is_stack=True))

    def leaf(self, kind: str, key: str, marker: torch.Tensor, where: Callable[[int], Where]) -> LeafLayout:
        """Return the layout of a full tensor. `where` returns the ranks that hold a held tensor."""
        held, number, is_stack = self.source(marker)
        if number is None:
            return leaf_layout(kind, key, marker, held, is_stack, self.layout.specs, where)
        packing = self.layout.layouts.packing
        assert isinstance(packing, FlatPacking)
        spec, begin, length = packing.place(number)
        piece = Piece(spec, held, None, Vector(packing.over, begin, length), where(held[0]))
        return LeafLayout(kind, key, tuple(marker.shape), marker.dtype, (piece,))


def saved_leaves(states: States, layout: StateLayout, where: Callable[[int], Where]) -> SavedLeaves:
    """Return the leaves of a checkpoint of a state. `where` returns the ranks that hold the held tensor of an index."""
    markers = _Markers(layout)
    leaves = [
        markers.new(look.shape, look.dtype, _Origin((index,)))
        if isinstance(look, TensorSignature)
        else _Constant(index)
        for index, look in enumerate(layout.signatures)
    ]
    params, state, added = states.full(layout, leaves, markers.of_vector, markers.join)
    found = [("params", key, leaf) for key, leaf in _named(params)]
    found += [("optimizer", key, leaf) for key, leaf in _named(state)]
    found += [("optimizer", f"~{name}/{key}", leaf) for name, each in added.items() for key, leaf in _named(each)]
    tensors = [markers.leaf(kind, key, leaf, where) for kind, key, leaf in found if isinstance(leaf, torch.Tensor)]
    numbers = {f"{kind}/{key}": leaf.index for kind, key, leaf in found if isinstance(leaf, _Constant)}
    stored, _ = layout.trees(leaves)
    stacks = layout.layouts.stacks
    if stacks is not None:
        stored = stacks.restack(stored, markers.join)
    covered = {index for leaf in tensors for piece in leaf.pieces for index in piece.held}
    rounded = [
        markers.leaf("params", key, leaf, where)
        for key, leaf in _named(stored)
        if isinstance(leaf, torch.Tensor) and not covered.issuperset(markers.source(leaf).held)
    ]
    trees = {"params/": params, "optimizer/": state, **{f"optimizer/~{name}/": each for name, each in added.items()}}
    owners = {f"{start}{key}": owner for start, each in trees.items() for key, owner in _owners(each, params)}
    return SavedLeaves(tuple(tensors), tuple(rounded), numbers, params, owners, _frozen(layout, params))


def _owners(tree: PyTree, params: PyTree) -> Iterator[tuple[str, str]]:
    """Yield the key of each leaf of a tree that has subtrees like the parameters, and its parameter's key."""
    structure = optree.tree_structure(params)
    keys = structure.unflatten(tree_keys(params))

    def is_like(x: PyTree) -> bool:
        try:
            structure.flatten_up_to(x)
        except (TypeError, ValueError):
            return False
        return True

    def owner(x: PyTree) -> PyTree:
        return optree.tree_map(lambda key, part: optree.tree_map(lambda _: key, part), keys, x) if is_like(x) else ""

    return zip(tree_keys(tree), optree.tree_leaves(optree.tree_map(owner, tree, is_leaf=is_like)), strict=True)


def _frozen(layout: StateLayout, params: PyTree) -> dict[str, tuple[int, ...]]:
    signatures = layout.signatures[: layout.params.num_leaves]
    trained = [isinstance(x, TensorSignature) and (x.dtype.is_floating_point or x.dtype.is_complex) for x in signatures]
    fixed = [not moves or flag for moves, flag in zip(trained, layout.layouts.frozen, strict=True)]
    tree = layout.params.unflatten(fixed)
    if layout.layouts.stacks is not None:
        tree = layout.layouts.stacks.restack(tree, all)
    rows = zip(_named(params), optree.tree_leaves(tree), strict=True)
    return {key: tuple(leaf.shape) for (key, leaf), flag in rows if flag and isinstance(leaf, torch.Tensor)}


def _named(tree: PyTree) -> list[tuple[str, Any]]:
    return list(zip(tree_keys(tree), optree.tree_leaves(tree), strict=True))
