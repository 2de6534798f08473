"""Stacked layer parameters: one tensor in the user's tree, one parameter per layer in a pipeline.

A pipeline stores each layer on the rank of its stage. The trees are converted at entry and exit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import optree
import torch

from sharding_specs import tree_paths

from .request import PyTree


@dataclass(frozen=True)
class StackedTree:
    """Tree of parameters of which some are stacks of layers, and its form with a list of layers for each stack.

    >>> tree = {"b": torch.ones(2), "w": torch.ones(3, 2)}
    >>> stacked = StackedTree.of(tree, [False, True])
    >>> layers = stacked.unstack(tree)
    >>> [tuple(layer.shape) for layer in layers["w"]], tuple(stacked.restack(layers)["w"].shape)
    ([(2,), (2,), (2,)], (3, 2))
    """

    tree: optree.PyTreeSpec
    lengths: tuple[int, ...]  # number of layers of each leaf, 0 for a leaf that is no stack

    @classmethod
    def of(cls, params: PyTree, are_stacks: Iterable[bool]) -> StackedTree:
        leaves, tree = optree.tree_flatten(params)
        pairs = zip(leaves, are_stacks, strict=True)
        return cls(tree, tuple(leaf.shape[0] if is_stack else 0 for leaf, is_stack in pairs))

    @cached_property
    def layers(self) -> optree.PyTreeSpec:
        return optree.tree_structure(self.spread([0] * len(self.lengths)))

    @cached_property
    def paths(self) -> Mapping[str, int]:
        rows = zip(tree_paths(self.tree.unflatten(self.lengths)), self.lengths, strict=True)
        return {f"{path}/{layer}": length for path, length in rows for layer in range(length)}

    def spread(self, values: Sequence[Any], of_layer: Callable[[Any], Any] = lambda x: x) -> PyTree:
        pairs = zip(values, self.lengths, strict=True)
        return self.tree.unflatten([[of_layer(one)] * count if count else one for one, count in pairs])

    def unstack(self, params: PyTree) -> PyTree:
        """Return the tree with a list of layers for every stack. A leaf that is no tensor belongs to each layer."""
        pairs = zip(self.tree.flatten_up_to(params), self.lengths, strict=True)
        return self.tree.unflatten([_layers(leaf, count) if count else leaf for leaf, count in pairs])

    def restack(self, params: PyTree, join: Callable[[list[Any]], Any] | None = None) -> PyTree:
        rest = iter(optree.tree_leaves(params))
        joined = join or _stack
        found = [joined([next(rest) for _ in range(count)]) if count else next(rest) for count in self.lengths]
        return self.tree.unflatten(found)

    def restack_all(self, value: PyTree, join: Callable[[list[Any]], Any] | None = None) -> PyTree:
        if not any(self.lengths):
            return value

        def is_like_them(x: PyTree) -> bool:
            return bool(optree.tree_structure(x) == self.layers)

        restack = partial(self.restack, join=join)
        return optree.tree_map(lambda x: restack(x) if is_like_them(x) else x, value, is_leaf=is_like_them)

    def unstack_all(self, value: PyTree, params: PyTree) -> PyTree:
        leaves = optree.tree_leaves(params)

        def is_like_them(x: PyTree) -> bool:
            return bool(optree.tree_structure(x) == self.tree) and all(
                not isinstance(mine, torch.Tensor) or mine.shape == getattr(leaf, "shape", None)
                for mine, leaf in zip(optree.tree_leaves(x), leaves, strict=True)
            )

        return optree.tree_map(lambda x: self.unstack(x) if is_like_them(x) else x, value, is_leaf=is_like_them)


def _layers(leaf: PyTree, count: int) -> list[PyTree]:
    return list(leaf.unbind(0)) if isinstance(leaf, torch.Tensor) else [leaf] * count


def _stack(layers: list[PyTree]) -> PyTree:
    return torch.stack(layers) if layers and isinstance(layers[0], torch.Tensor) else layers[0]
