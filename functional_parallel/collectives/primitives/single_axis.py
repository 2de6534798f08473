"""Decomposition of a collective over several axes into collectives over one axis each.

This is needed if the axes have different communicators: nested vmap levels, or a vmap level inside a mesh. The first
axis is major: rank (i, j) of axes (a, b) has index i·|b| + j.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..axes import axis_size

__all__ = ["one_axis_at_a_time"]

Emit = Callable[..., Tensor]


def one_axis_at_a_time(
    operation: str, emit: Emit, index: Tensor, x: Tensor, axes: tuple[str, ...], params: Sequence[Any]
) -> Tensor:
    """Apply a primitive over several axes, the first one major, one at a time.

    `emit` applies it over one axis. `index` is the index of this rank along the axes.
    """
    if operation == "all_to_all":
        return _all_to_all(emit, x, axes, *params)
    if operation == "ppermute":
        return _ppermute(emit, index, x, axes, *params)
    if operation == "pbroadcast":
        return _pbroadcast(emit, x, axes, *params)
    # Gathering concatenates the minor chunks first; splitting takes the major chunks first.
    for axis in reversed(axes) if operation == "all_gather" else axes:
        x = emit(operation, x, (axis,), *params)
    return x


def _all_to_all(emit: Emit, x: Tensor, axes: tuple[str, ...], split_dim: int, concat_dim: int) -> Tensor:
    """Split one dim per axis off `split_dim`, exchange each, and merge the exchanged dims into `concat_dim`."""
    sizes = [axis_size(axis) for axis in axes]
    x = x.unflatten(split_dim, (*sizes, -1))
    dims = [split_dim + position for position in range(len(axes))]
    for axis, dim in zip(axes, dims, strict=True):
        x = emit("all_to_all", x, (axis,), dim, dim)
    targets = [concat_dim + position for position in range(len(axes))]
    return x.movedim(dims, targets).flatten(concat_dim, concat_dim + len(axes))


def _ppermute(emit: Emit, index: Tensor, x: Tensor, axes: tuple[str, ...], pairs: Sequence[int]) -> Tensor:
    """Gather all values and select one. A permutation of several axes may not be a product of one per axis."""
    everything = x.unsqueeze(0)
    for axis in reversed(axes):
        everything = emit("all_gather", everything, (axis,), 0, "varying")
    senders = torch.full((axis_size(axes),), -1, device=x.device)
    senders[list(pairs[1::2])] = torch.tensor(pairs[0::2], dtype=senders.dtype, device=x.device)
    sender = senders.index_select(0, index.to(x.device).reshape(1))
    value = everything.index_select(0, sender.clamp(min=0)).squeeze(0)
    return torch.where(sender.squeeze(0) >= 0, value, torch.zeros_like(value))


def _pbroadcast(emit: Emit, x: Tensor, axes: tuple[str, ...], source: int) -> Tensor:
    for position, axis in enumerate(axes):
        minor = axis_size(axes[position + 1 :]) if axes[position + 1 :] else 1
        x = emit("pbroadcast", x, (axis,), source // minor % axis_size(axis))
    return x
