"""Signature of a pytree, which programs depend on: structure, shapes and dtypes; and its text in messages."""

from __future__ import annotations

from typing import Any

import optree
import torch

__all__ = ["leaf_signature", "listed", "on_one_line", "signature_text", "structure_as_text"]

_MOST = 8  # lines or names in a list of a message


def leaf_signature(leaf: Any) -> Any:
    """Return the signature of a leaf: shape and dtype of a tensor, `repr` of anything else."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)


def signature_text(look: Any) -> str:
    """Return a leaf's signature as text for messages.

    >>> signature_text(leaf_signature(torch.ones(2, 3)))
    '(2, 3) float32'
    """
    return look if isinstance(look, str) else f"{look[0]} {str(look[1]).removeprefix('torch.')}"


def on_one_line(text: Any) -> str:
    """Return `text` with each run of whitespace replaced by one space."""
    return " ".join(str(text).split())


def structure_as_text(tree: optree.PyTreeSpec) -> str:
    """Return a tree's structure as text for messages.

    >>> structure_as_text(optree.tree_structure({"w": 1, "b": 2}))
    "{'b': *, 'w': *}"
    """
    text = on_one_line(tree).removeprefix("PyTreeSpec(").removesuffix(")")
    return text.removesuffix(", NoneIsLeaf")


def listed(lines: list[str]) -> list[str]:
    """Return the first lines of a list, and the number of remaining lines.

    >>> listed([str(number) for number in range(20)])[-2:]
    ['7', 'and 12 more']
    """
    more = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return [*lines[:_MOST], *more]
