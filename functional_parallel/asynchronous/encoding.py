"""Trees of tensors as bytes. Both ends know the structure of the tree, so only tensors are sent."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import optree
import torch

from ..functions import PyTree

__all__ = ["decoded", "encoded"]

_ALIGNED = 16  # bytes, as the widest dtype
_PADDING = memoryview(bytes(_ALIGNED))


def encoded(tree: PyTree) -> tuple[list[memoryview], list[Any] | None, Any]:
    """Return the bytes of the tensors, their dtypes and shapes, and what has to live until they are sent."""
    if tree is None:
        return [], None, None
    tensors = [leaf.detach().cpu().contiguous() for leaf in optree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    parts = []
    for x in tensors:
        size = x.numel() * x.element_size()
        if size:
            parts.append(memoryview((ctypes.c_char * size).from_address(x.data_ptr())).cast("B"))
            parts.append(_PADDING[: -size % _ALIGNED])
    return parts, [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in tensors], tensors


def decoded(described: Sequence[Any] | None, body: bytearray, template: PyTree) -> PyTree:
    """Return a tree like the template with the tensors of a message, on the template's devices."""
    if described is None:
        return None
    leaves, tree = optree.tree_flatten(template)
    given, offset = iter(described), 0
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            continue
        name, shape = next(given)
        dtype = getattr(torch, name)
        size = torch.Size(shape).numel() * dtype.itemsize
        if size:
            x = torch.frombuffer(body, dtype=dtype, count=size // dtype.itemsize, offset=offset).reshape(shape)
        else:
            x = torch.empty(shape, dtype=dtype)
        leaves[index] = x.to(leaf.device)
        offset += size + -size % _ALIGNED
    return optree.tree_unflatten(tree, leaves)
