"""How every primitive is called, by users, by transposes and by whoever interprets a traced program again.

`apply_primitive("psum", x, axes, "varying")` has the arguments of the library op `torch.ops.fp.psum`, but is
differentiable: it applies the primitive's `torch.autograd.Function`. The raw op in a traced graph carries no
derivative, so a graph that is interpreted under a transform must go through here.

All Functions take `(x, lane, axes, *params)`. `lane` is None, or, when the axes are one vmap level, the index of that
level's entries: an integer tensor mapped over exactly that level. Its `in_dims` entry is how a `vmap` rule knows the
level that its axes mean, also when x itself is the same for all entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..axes import axis_size, communicator_for, restored, share_communicator, snapshot
from ..grad_mode import keeping_grad_mode
from ..types import CollectiveTypeError, State
from ..vmap import Lane
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
    """Make `apply_primitive` know a primitive's Function, by the name it carries."""
    _FUNCTIONS[function.operation] = function  # type: ignore[attr-defined]
    return function


def apply_primitive(operation: str, x: Tensor, axes: Sequence[str], *params: Any) -> Tensor:
    """Apply a primitive, differentiably.

    Args:
        operation: the name of an op in `torch.ops.fp`.
        x: its operand.
        axes: mesh axes, the first one major. Axes bound in different places are gone through one at a time.
        params: the library op's other arguments, checked by the caller.

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
        return _FUNCTIONS[operation].apply(x, lane, axes, *params)


def axis_index(axes: Sequence[str]) -> Tensor:
    """This rank's index along the axes, the first one major: an integer scalar, Varying."""
    axes = tuple(axes)
    if not share_communicator("axis_index", axes):
        index = axis_index(axes[:1])
        for axis in axes[1:]:
            index = index * axis_size(axis) + axis_index((axis,))
        return index
    carrier = communicator_for("axis_index", axes)
    return carrier.index if isinstance(carrier, Lane) else torch.ops.fp.axis_index(axes)


# ---------------------------------------------------------------------------------------------------------------------
# What the Functions share
# ---------------------------------------------------------------------------------------------------------------------


def save_for_transpose(ctx: Any, inputs: tuple[Any, ...]) -> None:
    """Keep on `ctx` what every jvp and backward needs: the arguments, and the axes' meaning at the time of the call."""
    ctx.params = inputs[2:]
    ctx.environment = snapshot()


def transpose(ctx: Any, operation: str, cotangent: Tensor, *params: Any) -> tuple[Tensor | None, ...]:
    """What a backward returns whose transpose is another primitive over the same axes."""
    with restored(ctx.environment):
        result = apply_primitive(operation, cotangent, ctx.params[0], *params)
    return result, None, *(None for _ in ctx.params)


def named_vmap(
    function: type[torch.autograd.Function], info: Any, in_dims: tuple[Any, ...], *inputs: Any
) -> tuple[Tensor, int | None]:
    """The vmap rule of every primitive.

    Over an unrelated level the mapped dim rides along behind all others, so that dims keep their numbers and one
    collective moves the whole batch. Over the level that the axes name, the entries are the ranks: the group's
    semantics applies, and a result that all ranks share loses the dim, which is how vmap knows it is Invariant.
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
    """Gradients of Invariant values arrive here too, which is where a forgotten pvary shows."""
    casts_an_invariant = operation == "pcast" and source_of_cast(*params) == "invariant"
    if operation == "pscatter" or casts_an_invariant:
        what = f"pcast to {params[1]}" if casts_an_invariant else "pscatter"
        raise CollectiveTypeError(
            f"{what} over axis {axis!r}: the operand varies along this vmap level, but must be the same on all its "
            f"ranks. In a backward this is the gradient of an Invariant value that met a Varying one; write "
            f"fp.pvary(x, {axis!r}) on the Invariant value where they meet"
        )


def source_of_cast(src: str, dst: str) -> str:
    """The state a cast starts from: as declared, or for "auto" the usual one."""
    return ("varying" if dst == "unreduced" else "invariant") if src == "auto" else src
