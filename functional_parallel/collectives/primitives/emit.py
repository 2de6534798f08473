"""Application of primitives by name, for users, transposes and interpreters of traced programs.

The raw op in a traced graph has no derivative, so a graph that is interpreted under a transform must use this module.
A collective over axes with different communicators (nested vmap levels, or a vmap level inside a mesh) is decomposed
into collectives over one axis each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..axes import axis_size, communicator_for, share_communicator
from ..communicator import Lane
from ..types import Param

APPLY: dict[str, Callable[..., Tensor]] = {}  # `apply(x, lane, axes, *params)` of every primitive's Function


def apply_primitive(operation: str, x: Tensor, axes: Sequence[str], *params: Param) -> Tensor:
    """Apply a primitive, by its name in `torch.ops.fp`, differentiably. The first axis is major."""
    axes = tuple(axes)
    if not share_communicator(operation, axes):
        return _one_axis_at_a_time(operation, x, axes, params)
    communicator = communicator_for(operation, axes)
    lane = communicator.index if isinstance(communicator, Lane) else None
    with keeping_grad_mode():
        return APPLY[operation](x, lane, axes, *params)


def axis_index(axes: Sequence[str]) -> Tensor:
    axes = tuple(axes)
    if not share_communicator("axis_index", axes):
        index = axis_index(axes[:1])
        for axis in axes[1:]:
            index = index * axis_size(axis) + axis_index((axis,))
        return index
    communicator = communicator_for("axis_index", axes)
    return communicator.index if isinstance(communicator, Lane) else torch.ops.fp.axis_index(axes)


# --- Grad mode at the call of a primitive. Inside the primitive's autograd.Function torch has disabled gradients ---

_at_call: ContextVar[bool | None] = ContextVar("gradients at the call", default=None)


@contextmanager
def keeping_grad_mode() -> Iterator[None]:
    """Record the grad mode around a Function's `apply`. Under torch.func, `apply` calls itself once per level."""
    token = _at_call.set(torch.is_grad_enabled()) if _at_call.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _at_call.reset(token)


def gradients_at_call() -> bool | None:
    """Whether gradients were enabled where the running primitive was called. None if no primitive is running."""
    return _at_call.get()


# --- One axis at a time ---


def _one_axis_at_a_time(operation: str, x: Tensor, axes: tuple[str, ...], params: Sequence[Any]) -> Tensor:
    if operation == "all_to_all":
        return _all_to_all(x, axes, *params)
    if operation == "ppermute":
        return _ppermute(x, axes, *params)
    if operation == "pbroadcast":
        return _pbroadcast(x, axes, *params)
    # Gathering concatenates the minor chunks first; splitting takes the major chunks first.
    for axis in reversed(axes) if operation == "all_gather" else axes:
        x = apply_primitive(operation, x, (axis,), *params)
    return x


def _all_to_all(x: Tensor, axes: tuple[str, ...], split_dim: int, concat_dim: int) -> Tensor:
    x = x.unflatten(split_dim, (*map(axis_size, axes), -1))
    dims = [split_dim + position for position in range(len(axes))]
    for axis, dim in zip(axes, dims, strict=True):
        x = apply_primitive("all_to_all", x, (axis,), dim, dim)
    targets = [concat_dim + position for position in range(len(axes))]
    return x.movedim(dims, targets).flatten(concat_dim, concat_dim + len(axes))


def _ppermute(x: Tensor, axes: tuple[str, ...], pairs: Sequence[int]) -> Tensor:
    """Gather all values and select one. A permutation of several axes may not be a product of one per axis."""
    everything = x.unsqueeze(0)
    for axis in reversed(axes):
        everything = apply_primitive("all_gather", everything, (axis,), 0, "varying")
    senders = torch.full((axis_size(axes),), -1, device=x.device)
    senders[list(pairs[1::2])] = torch.tensor(pairs[0::2], dtype=senders.dtype, device=x.device)
    sender = senders.index_select(0, axis_index(axes).to(x.device).reshape(1))
    value = everything.index_select(0, sender.clamp(min=0)).squeeze(0)
    return torch.where(sender.squeeze(0) >= 0, value, torch.zeros_like(value))


def _pbroadcast(x: Tensor, axes: tuple[str, ...], source: int) -> Tensor:
    for position, axis in enumerate(axes):
        minor = axis_size(axes[position + 1 :]) if axes[position + 1 :] else 1
        x = apply_primitive("pbroadcast", x, (axis,), source // minor % axis_size(axis))
    return x
