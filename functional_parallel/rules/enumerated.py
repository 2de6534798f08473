"""Indices that enumerate a dim: `x[torch.arange(len(x)), labels]` takes one element of every row.

The rule of indexing lets such a dim stay sharded. Each rank then enumerates the rows of its shard from 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..ir import Traced, info, update_info
from ..tracing import assume_constants, constant_in

__all__ = ["note_enumerated"]

aten = torch.ops.aten

_INDEXING = (aten.index.Tensor, aten.index_put.default)


def note_enumerated(traced: Traced) -> None:
    """Store in the info of every indexing op the dims that its indices enumerate."""
    known: dict[fx.Node, Any] = {}
    for node in traced.nodes:
        if node.target in _INDEXING:
            found = tuple(_enumerated(traced, node, known).items())
            if found:
                update_info(node, enumerated=found)


def _enumerated(traced: Traced, node: fx.Node, known: dict[fx.Node, Any]) -> dict[int, int]:
    """Map each dim of x that an index enumerates to the dim of the broadcast indices along which it does so."""
    x = info(node.args[0]).aval.shape
    indices = {dim: index for dim, index in enumerate(node.args[1]) if index is not None}
    avals = {dim: info(index).aval for dim, index in indices.items()}
    if any(aval.dtype == torch.bool for aval in avals.values()):
        return {}
    ndim = max(len(aval.shape) for aval in avals.values())
    found: dict[int, int] = {}
    for dim, index in indices.items():
        along = _dims_enumerating(avals[dim].shape, x[dim], ndim)
        value = constant_in(traced, index, known) if along else None
        if value is None:
            continue
        for k in along:
            column = torch.arange(x[dim]).reshape([-1 if each == k else 1 for each in range(ndim)])
            if k not in found.values() and bool((value == column).all()):
                found[dim] = k
                assume_constants(traced, index)
                break
    return found


def _dims_enumerating(shape: tuple[int, ...], length: int, ndim: int) -> list[int]:
    """Dims of the broadcast indices along which an index of shape `shape` may enumerate `length` rows."""
    return [k for k, size in enumerate(shape, ndim - len(shape)) if size == length]
