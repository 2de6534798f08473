"""What programs depend on of a tree: its structure, and each leaf's shape and dtype; and how messages tell them."""

from __future__ import annotations

from typing import Any

import optree
import torch

__all__ = ["leaf_signature", "listed", "on_one_line", "signature_text", "structure_as_text"]

_MOST = 8  # lines, or names, of a message that lists them


def leaf_signature(leaf: Any) -> Any:
    """What a program depends on of a leaf: a tensor's shape and dtype, anything else itself."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf)


def signature_text(look: Any) -> str:
    """A leaf's look as messages show it.

    >>> look_as_text(look(torch.ones(2, 3)))
    '(2, 3) float32'
    """
    return look if isinstance(look, str) else f"{look[0]} {str(look[1]).removeprefix('torch.')}"


def on_one_line(text: Any) -> str:
    """A text without its line breaks."""
    return " ".join(str(text).split())


def structure_as_text(tree: optree.PyTreeSpec) -> str:
    """A tree's structure as messages show it.

    >>> structure_as_text(optree.tree_structure({"w": 1, "b": 2}))
    "{'b': *, 'w': *}"
    """
    text = on_one_line(tree).removeprefix("PyTreeSpec(").removesuffix(")")
    return text.removesuffix(", NoneIsLeaf")


def listed(lines: list[str]) -> list[str]:
    """The first lines of many, and how many more there are.

    >>> listed([str(number) for number in range(20)])[-2:]
    ['7', 'and 12 more']
    """
    more = [f"and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return [*lines[:_MOST], *more]
