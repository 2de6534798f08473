"""Signature of a pytree, which programs depend on: structure, shapes and dtypes; and its text in messages."""

from __future__ import annotations

from typing import Any

import optree

from sharding_specs.pytree import Tree

from .. import ir
from ..ir import LeafSignature, TensorSignature

__all__ = ["leaf_signature", "listed", "on_one_line", "signature_text", "structure_as_text"]

_MOST = 8  # lines or names in a list of a message


def leaf_signature(leaf: Tree) -> LeafSignature:
    """Return the signature of a leaf on any device: shape and dtype of a tensor, `repr` of anything else."""
    return ir.leaf_signature(leaf, exact=False)


def signature_text(look: LeafSignature) -> str:
    """Return a leaf's signature as text for messages.

    >>> import torch
    >>> signature_text(leaf_signature(torch.ones(2, 3)))
    '(2, 3) float32'
    """
    return f"{look.shape} {look.dtype_name}" if isinstance(look, TensorSignature) else look.text


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
