"""Subtrees of an optimizer's state that have the structure of the parameters, such as moments."""

from __future__ import annotations

from collections.abc import Callable

import optree
import torch

from sharding_specs import P

from ..functions import PyTree, SpecTree


def like_params(state: PyTree, params: PyTree, specs: SpecTree) -> SpecTree:
    """Return the specs of an optimizer state: the parameters' specs where it has their structure and shapes."""
    is_like = _is_like(optree.tree_structure(params))

    def placed(leaf: PyTree, param: PyTree, spec: P) -> P:
        return spec if getattr(leaf, "shape", None) == getattr(param, "shape", None) else P()

    def of_subtree(x: PyTree) -> SpecTree:
        return optree.tree_map(placed, x, params, specs) if is_like(x) else P()

    return optree.tree_map(of_subtree, state, is_leaf=is_like)


def tree_map_params(change: Callable[[PyTree], PyTree], state: PyTree, structure: optree.PyTreeSpec) -> PyTree:
    is_like = _is_like(structure)
    return optree.tree_map(lambda x: change(x) if is_like(x) else x, state, is_leaf=is_like)


def tree_map_of_params(
    change: Callable[..., PyTree], structure: optree.PyTreeSpec, new: PyTree, old: PyTree, *trees: PyTree
) -> PyTree:
    """Map over two states of one structure, parameter by parameter, and over `trees` of the parameters' structure.

    It is in the smallest subtrees that begin with the parameters' structure. A parameter has a leaf there, or several,
    such as the row and column means of adafactor. The rest of the new state stays.
    """
    is_like = _is_like(structure)

    def begins(x: PyTree) -> bool:
        try:
            return is_like(x) or (structure.num_nodes > 1 and bool(structure.flatten_up_to(x)))
        except ValueError:
            return False

    def is_smallest(x: PyTree) -> bool:
        return begins(x) and (is_like(x) or not any(map(has_one, optree.tree_flatten_one_level(x)[0])))

    def has_one(x: PyTree) -> bool:
        return any(map(begins, optree.tree_leaves(x, is_leaf=begins)))

    kept = (each for each in optree.tree_leaves(old, is_leaf=is_smallest) if is_smallest(each))

    def changed(subtree: PyTree) -> PyTree:
        rows = map(structure.flatten_up_to, (subtree, next(kept), *trees))
        return structure.unflatten(list(map(change, *rows)))

    return optree.tree_map(lambda x: changed(x) if is_smallest(x) else x, new, is_leaf=is_smallest)


def _is_like(structure: optree.PyTreeSpec) -> Callable[[PyTree], bool]:
    def is_like(x: PyTree) -> bool:
        is_scalar = isinstance(x, torch.Tensor) and x.ndim == 0
        return structure.num_leaves > 0 and not is_scalar and optree.tree_structure(x) == structure

    return is_like
