"""What an optimizer's update returns: parameters and state as it was given, for the next step is the same program."""

from __future__ import annotations

from typing import Any

import optree
import torch

from sharding_specs import tree_paths

from ..local_function import PyTree

__all__ = ["require_alike"]

_MOST = 8  # leaves that an error lists


def require_alike(returned: Any, params: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """New parameters and state, after a check that they are of the old ones' trees, shapes and dtypes.

    Args:
        returned: by the update.
        params, state: what it was given.

    Raises:
        TypeError: when it is no pair.
        ValueError: listing what differs, by path.
    """
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"the optimizer's update returned a {type(returned).__name__}; it returns (new parameters, new state)"
        )
    problems = [
        *_differences("parameters", params, returned[0]),
        *_differences("state", state, returned[1]),
    ]
    if problems:
        more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
        raise ValueError(
            "the optimizer's update shall return (new parameters, new state) like those that it was given, for a step "
            "is a program that runs again on what it made:\n  " + "\n  ".join([*problems[:_MOST], *more])
        )
    return returned  # type: ignore[return-value]


def _differences(name: str, given: PyTree, returned: PyTree) -> list[str]:
    before, after = (optree.tree_structure(tree, none_is_leaf=True) for tree in (given, returned))
    if before != after:
        return [f"{name}: given as {_on_one_line(before)}, returned as {_on_one_line(after)}"]
    leaves = [optree.tree_leaves(tree, none_is_leaf=True) for tree in (given, returned)]
    paths = tree_paths(optree.tree_map(lambda _: 0, given, none_is_leaf=True))
    return [
        f"{name}{path and '/' + path}: {_difference(old, new)}"
        for path, old, new in zip(paths, *leaves, strict=True)
        if _look(old) != _look(new)
    ]


def _on_one_line(structure: Any) -> str:
    return " ".join(str(structure).removeprefix("PyTreeSpec(").removesuffix(", NoneIsLeaf)").split())


def _difference(old: Any, new: Any) -> str:
    found = f"given as {_look(old)}, returned as {_look(new)}"
    if isinstance(old, torch.Tensor):
        return found
    return f"{found}; what changes from step to step is a tensor, torch.tensor({old!r}) in `init`"


def _look(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return f"{tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
