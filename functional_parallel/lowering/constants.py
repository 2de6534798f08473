"""Leaves that are no tensors: a program takes them as they are when it is traced, and is traced anew for others.

That is right for numbers, strings and flags, which say what they are. A NumPy array, or an object that holds tensors
and is no pytree, as a tokenizer's `BatchEncoding`, does not: the program would go on with the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

from sharding_specs import register_dataclasses, tree_paths

from ..functions import PyTree

__all__ = ["check_static_leaves"]


def check_static_leaves(tree: PyTree, where: str) -> None:
    """Refuse leaves whose content a program would take for a constant.

    Args:
        tree: arguments or results of what is traced.
        where: what they are of, for the error.

    Raises:
        TypeError: listing every such leaf by its path.
    """
    register_dataclasses(tree)
    leaves = optree.tree_leaves(tree)
    if not any(map(_hides_tensors, leaves)):
        return
    wrong = [
        f"  {path or 'the value'}: {_kind(leaf)}"
        for path, leaf in zip(tree_paths(tree), leaves, strict=True)
        if _hides_tensors(leaf)
    ]
    raise TypeError(
        f"{where}: what is traced takes and returns tensors in dicts, lists, tuples, NamedTuples and dataclasses; "
        "anything else is a constant of the program, which would not change with the batch:\n" + "\n".join(wrong) + "\n"
        "Write torch.as_tensor(array) for an array, dict(batch) for a mapping, or make the class "
        "a pytree by optree.register_pytree_node"
    )


def _hides_tensors(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor) or callable(leaf):  # a module or a function is closed over, as in torch.func
        return False
    return _is_array(leaf) or any(map(_is_content, optree.tree_leaves(_content(leaf))))


def _is_content(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) or _is_array(leaf) or (isinstance(leaf, Mapping) and _hides_tensors(leaf))


def _is_array(leaf: Any) -> bool:
    """NumPy's and others' arrays; their scalars, which can be hashed, say what they are."""
    return hasattr(leaf, "__array__") and (getattr(leaf, "ndim", 0) > 0 or type(leaf).__hash__ is None)


def _content(leaf: Any) -> list[Any]:
    """What an object holds."""
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    slots = [getattr(leaf, name) for name in getattr(leaf, "__slots__", ()) if hasattr(leaf, name)]
    return [*getattr(leaf, "__dict__", {}).values(), *slots]


def _kind(leaf: Any) -> str:
    if _is_array(leaf):
        return f"an array, {type(leaf).__module__}.{type(leaf).__name__} of shape {tuple(leaf.shape)}"
    name = f"{type(leaf).__module__}.{type(leaf).__name__}"
    return f"{name}, {getattr(leaf, 'as_argument', 'which is no pytree and holds tensors')}"
