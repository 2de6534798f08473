"""Check of the result of an optimizer's update.

The next step runs the same program, so new parameters and state must have the signatures of the old ones.
"""

from __future__ import annotations

from collections.abc import Callable

import optree
import torch

from sharding_specs import tree_paths

from ...functions import PyTree
from ...ir import leaf_signature
from ...stateful import listed, structure_as_text

Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


def require_same_structure(returned: PyTree, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Check that new parameters and state have the structure, shapes and dtypes of the old ones, and return them."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"the optimizer's update returned a {type(returned).__name__}; it returns (new parameters, new state)"
        )
    problems = [*_differences("parameters", params, returned[0]), *_differences("state", state, returned[1])]
    if problems:
        raise ValueError(
            "the optimizer's update shall return (new parameters, new state) like those that it was given, for a step "
            "is a program that runs again on what it made:\n  " + "\n  ".join(listed(problems))
        )
    return returned


def _differences(name: str, given: PyTree, returned: PyTree) -> list[str]:
    before, after = (optree.tree_structure(tree, none_is_leaf=True) for tree in (given, returned))
    if before != after:
        return [f"{name}: given as {structure_as_text(before)}, returned as {structure_as_text(after)}"]
    leaves = [optree.tree_leaves(tree, none_is_leaf=True) for tree in (given, returned)]
    paths = tree_paths(optree.tree_map(lambda _: 0, given, none_is_leaf=True))
    return [
        f"{name}{path and '/' + path}: {_difference(old, new)}"
        for path, old, new in zip(paths, *leaves, strict=True)
        if leaf_signature(old) != leaf_signature(new)
    ]


def _difference(old: PyTree, new: PyTree) -> str:
    found = f"given as {leaf_signature(old)}, returned as {leaf_signature(new)}"
    if isinstance(old, torch.Tensor):
        return found
    return f"{found}; what changes from step to step is a tensor, torch.tensor({old!r}) in `init`"
