"""Application of primitives by name, for users, transposes and interpreters of traced programs.

`apply_primitive("psum", x, axes, "varying")` has the arguments of the library op `torch.ops.fp.psum`. It is
differentiable, because it applies the primitive's `torch.autograd.Function`. The raw op in a traced graph has no
derivative, so a graph that is interpreted under a transform must use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..axes import axis_size, communicator_for, share_communicator
from ..communicator import Lane
from ..grad_mode import keeping_grad_mode
from ..types import Param
from . import single_axis

__all__ = ["APPLY", "apply_primitive", "axis_index"]

APPLY: dict[str, Callable[..., Tensor]] = {}  # `apply(x, lane, axes, *params)` of every primitive's Function


def apply_primitive(operation: str, x: Tensor, axes: Sequence[str], *params: Param) -> Tensor:
    """Apply a primitive, by its name in `torch.ops.fp`, differentiably.

    The first axis is major. Axes with different communicators are processed one at a time.
    """
    axes = tuple(axes)
    if not share_communicator(operation, axes):
        return single_axis.one_axis_at_a_time(operation, apply_primitive, axis_index(axes), x, axes, params)
    carrier = communicator_for(operation, axes)
    lane = carrier.index if isinstance(carrier, Lane) else None
    with keeping_grad_mode():
        return APPLY[operation](x, lane, axes, *params)


def axis_index(axes: Sequence[str]) -> Tensor:
    """Return the index of this rank along the axes, the first one major, as a Varying integer scalar."""
    axes = tuple(axes)
    if not share_communicator("axis_index", axes):
        index = axis_index(axes[:1])
        for axis in axes[1:]:
            index = index * axis_size(axis) + axis_index((axis,))
        return index
    carrier = communicator_for("axis_index", axes)
    return carrier.index if isinstance(carrier, Lane) else torch.ops.fp.axis_index(axes)
