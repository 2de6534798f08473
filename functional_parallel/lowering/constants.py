"""Check of leaves that are not tensors. They are constants of a program, which is retraced if they change.

This is correct for numbers, strings and flags, because their repr identifies them. It is wrong for a NumPy array, and
for an object that holds tensors and is not a pytree, such as a tokenizer's `BatchEncoding`. The program would keep
using the first value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

from sharding_specs import register_dataclasses, tree_paths

from ..functions import PyTree


def check_static_leaves(tree: PyTree, where: str) -> None:
    """Raise `TypeError`, with the path of each, for leaves with content that a program would treat as a constant."""
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


def _hides_tensors(leaf: PyTree) -> bool:
    if isinstance(leaf, torch.Tensor) or callable(leaf):  # a module or a function is closed over, as in torch.func
        return False
    return _is_array(leaf) or any(map(_is_content, optree.tree_leaves(_content(leaf))))


def _is_content(leaf: PyTree) -> bool:
    return isinstance(leaf, torch.Tensor) or _is_array(leaf) or (isinstance(leaf, Mapping) and _hides_tensors(leaf))


def _is_array(leaf: PyTree) -> bool:
    """Whether `leaf` is an array of NumPy or another library. Hashable scalars are not: their repr identifies them."""
    return hasattr(leaf, "__array__") and (getattr(leaf, "ndim", 0) > 0 or type(leaf).__hash__ is None)


def _content(leaf: PyTree) -> list[Any]:
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    names = [name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ())]
    slots = [getattr(leaf, name) for name in names if hasattr(leaf, name)]
    return [*getattr(leaf, "__dict__", {}).values(), *slots]


def _kind(leaf: PyTree) -> str:
    if _is_array(leaf):
        return f"an array, {type(leaf).__module__}.{type(leaf).__name__} of shape {tuple(leaf.shape)}"
    name = f"{type(leaf).__module__}.{type(leaf).__name__}"
    return f"{name}, {getattr(leaf, 'as_argument', 'which is no pytree and holds tensors')}"
