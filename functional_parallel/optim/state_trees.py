"""Subtrees of an optimizer's state that have the structure of the parameters, such as moments."""

from __future__ import annotations

from collections.abc import Callable

import optree
import torch

from sharding_specs import P

from ..functions import PyTree, SpecTree


def like_params(state: PyTree, params: PyTree, specs: SpecTree) -> SpecTree:
    """Return the specs of an optimizer state: those of the parameters where it has their structure and shapes."""
    is_like = _is_like(optree.tree_structure(params))

    def placed(leaf: PyTree, param: PyTree, spec: P) -> P:
        return spec if getattr(leaf, "shape", None) == getattr(param, "shape", None) else P()

    def of_subtree(x: PyTree) -> SpecTree:
        return optree.tree_map(placed, x, params, specs) if is_like(x) else P()

    return optree.tree_map(of_subtree, state, is_leaf=is_like)


def tree_map_params(change: Callable[[PyTree], PyTree], state: PyTree, structure: optree.PyTreeSpec) -> PyTree:
    is_like = _is_like(structure)
    return optree.tree_map(lambda x: change(x) if is_like(x) else x, state, is_leaf=is_like)


def _is_like(structure: optree.PyTreeSpec) -> Callable[[PyTree], bool]:
    def is_like(x: PyTree) -> bool:
        is_scalar = isinstance(x, torch.Tensor) and x.ndim == 0
        return structure.num_leaves > 0 and not is_scalar and optree.tree_structure(x) == structure

    return is_like
