"""Application of primitives by name, for users, transposes and interpreters of traced programs.

`apply_primitive("psum", x, axes, "varying")` has the arguments of the library op `torch.ops.fp.psum`. It is
differentiable, because it applies the primitive's `torch.autograd.Function`. The raw op in a traced graph has no
derivative, so a graph that is interpreted under a transform must use this module.

All Functions take `(x, lane, axes, *params)`. If the axes are one vmap level, `lane` is the index of that level's
entries: an integer tensor mapped over exactly that level. If not, `lane` is None. By its `in_dims` entry, a `vmap` rule
recognizes the level of its axes even if x is not mapped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import CollectiveTypeError
from .. import reference
from ..axes import axis_size, communicator_for, restored, share_communicator, snapshot
from ..communicator import Lane
from ..grad_mode import keeping_grad_mode
from ..types import State
from . import single_axis

__all__ = [
    "apply_primitive",
    "axis_index",
    "named_vmap",
    "register",
    "save_for_transpose",
    "source_of_cast",
    "transpose",
]

_FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}


def register(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Register the Function of a primitive for `apply_primitive`, under its `operation`."""
    _FUNCTIONS[function.operation] = function  # type: ignore[attr-defined]
    return function


def apply_primitive(operation: str, x: Tensor, axes: Sequence[str], *params: Any) -> Tensor:
    """Apply a primitive differentiably.

    Args:
        operation: the name of an op in `torch.ops.fp`.
        x: its operand.
        axes: mesh axes, the first one major. Axes with different communicators are processed one at a time.
        params: other arguments of the library op, checked by the caller.

    Raises:
        UnboundAxisError: when an axis is not bound here.
        CollectiveTypeError: when a vmap level shows that x varies where it must not.
    """
    axes = tuple(axes)
    if not share_communicator(operation, axes):
        return single_axis.one_axis_at_a_time(operation, apply_primitive, axis_index(axes), x, axes, params)
    carrier = communicator_for(operation, axes)
    lane = carrier.index if isinstance(carrier, Lane) else None
    with keeping_grad_mode():
        result: Tensor = _FUNCTIONS[operation].apply(x, lane, axes, *params)
        return result


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


# ---------------------------------------------------------------------------------------------------------------------
# Helpers of the Functions
# ---------------------------------------------------------------------------------------------------------------------


def save_for_transpose(ctx: Any, inputs: tuple[Any, ...]) -> None:
    """Save the arguments and the current bindings of the axes on `ctx`, for every jvp and backward."""
    ctx.params = inputs[2:]
    ctx.environment = snapshot()


def transpose(ctx: Any, operation: str, cotangent: Tensor, *params: Any) -> tuple[Tensor | None, ...]:
    """Return the result of a backward that applies another primitive over the same axes to the cotangent."""
    with restored(ctx.environment):
        result = apply_primitive(operation, cotangent, ctx.params[0], *params)
    return result, None, *(None for _ in ctx.params)


def named_vmap(
    function: type[torch.autograd.Function], info: Any, in_dims: tuple[Any, ...], *inputs: Any
) -> tuple[Tensor, int | None]:
    """Apply the vmap rule of every primitive.

    Over an unrelated level, the mapped dim is moved to the end. The other dims keep their numbers, and one collective
    moves the entire batch. Over the level of the axes, the entries are the ranks, and `reference` computes the results.
    A result that is equal on all ranks loses the mapped dim, which marks it as Invariant to vmap.
    """
    x, lane, axes, *params = inputs
    if in_dims[1] is None:
        result = function.apply(x.movedim(in_dims[0], -1), lane, axes, *params)
        return result, result.ndim - 1
    operation = function.operation  # type: ignore[attr-defined]
    values = _values_of_ranks(operation, x, in_dims[0], info.batch_size, axes, params)
    results = reference.apply_reference(operation, values, *params)
    if function.leaves(*params) in (State.INVARIANT, State.REDUCED):  # type: ignore[attr-defined]
        return results[0], None
    return torch.stack(results), 0


def _values_of_ranks(
    operation: str, x: Tensor, dim: int | None, size: int, axes: Sequence[str], params: Sequence[Any]
) -> list[Tensor]:
    if dim is not None:
        _refuse_varying(operation, axes[0], params)
        return list(x.unbind(dim))
    if "unreduced" in params and operation != "pcast":
        raise CollectiveTypeError(
            f"{operation} over axis {axes[0]!r} of partial sums that are the same on all ranks of this vmap level. In "
            f"a backward this is a Reduced value that was cast as if it were Invariant; say what it is: "
            f"fp.pcast(x, {axes[0]!r}, to='varying', src='reduced')"
        )
    return [x] * size


def _refuse_varying(operation: str, axis: str, params: Sequence[Any]) -> None:
    """Raise for a varying operand that must be Invariant. A gradient after a forgotten pvary is also caught here."""
    casts_an_invariant = operation == "pcast" and source_of_cast(*params) == "invariant"
    if operation == "pscatter" or casts_an_invariant:
        what = f"pcast to {params[1]}" if casts_an_invariant else "pscatter"
        raise CollectiveTypeError(
            f"{what} over axis {axis!r}: the operand varies along this vmap level, but must be the same on all its "
            f"ranks. In a backward this is the gradient of an Invariant value that met a Varying one; write "
            f"fp.pvary(x, {axis!r}) on the Invariant value where they meet"
        )


def source_of_cast(src: str, dst: str) -> str:
    """Return the source state of a cast: the declared state, or the default for "auto"."""
    return ("varying" if dst == "unreduced" else "invariant") if src == "auto" else src
