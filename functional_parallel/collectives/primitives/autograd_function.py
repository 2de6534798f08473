"""The `torch.autograd.Function` of a primitive, built from its transpose.

All Functions take `(x, lane, axes, *params)`. If the axes are one vmap level, `lane` is the index of that level's
entries, mapped over exactly that level, so that a `vmap` rule recognizes the level even if x is not mapped. Over an
unrelated level, the rule moves the mapped dim to the end. Over the level of the axes, `reference` computes the results,
and a result that is equal on all ranks loses the mapped dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..._torch import InDims, VmapInfo, quick_apply, without_zeros
from ...errors import CollectiveTypeError, NotDifferentiableError
from .. import reference
from ..axes import Environment, restored, snapshot
from ..call import CollectiveCall, call_of
from ..types import Param, State
from .emit import APPLY, apply_primitive

AxisNames = tuple[str, ...]


class _PrimitiveContext(Protocol):
    axes: AxisNames
    params: Sequence[Param]
    environment: Environment  # bindings of the axes in the forward


def define(operation: str, leaves: State | None, transpose: Callable[..., Tensor] | None = None) -> None:
    """Define the Function of a primitive. `leaves` is the state of its result; None if a parameter gives it."""
    op: Callable[..., Tensor] = getattr(torch.ops.fp, operation)

    @without_zeros
    class Primitive(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor, lane: Tensor | None, axes: AxisNames, *params: Param) -> Tensor:
            return op(x, axes, *params)

        @staticmethod
        def setup_context(ctx: _PrimitiveContext, inputs: tuple[Any, ...], output: Tensor) -> None:
            _, _, ctx.axes, *ctx.params = inputs
            ctx.environment = snapshot()

        @staticmethod
        def jvp(ctx: _PrimitiveContext, tangent: Tensor, *_: None) -> Tensor:
            if transpose is None:
                raise _no_derivative(operation, ctx.axes)
            return apply_primitive(operation, tangent, ctx.axes, *ctx.params)

        @staticmethod
        def backward(ctx: _PrimitiveContext, cotangent: Tensor) -> tuple[Tensor | None, ...]:
            if transpose is None:
                raise _no_derivative(operation, ctx.axes)
            with restored(ctx.environment):
                result = transpose(cotangent, ctx.axes, *ctx.params)
            return result, None, None, *(None for _ in ctx.params)

        @staticmethod
        def vmap(
            info: VmapInfo, in_dims: InDims, x: Tensor, lane: Tensor | None, axes: AxisNames, *params: Param
        ) -> tuple[Tensor, int | None]:
            x_dim, lane_dim = in_dims[:2]
            if lane_dim is None:
                assert x_dim is not None
                result = APPLY[operation](x.movedim(x_dim, -1), lane, axes, *params)
                return result, result.ndim - 1
            call = call_of(operation, (x, axes, *params))
            results = reference.apply_reference(call, _values_of_ranks(call, x_dim, info.batch_size))
            if (leaves or State(str(call.dst))) in (State.INVARIANT, State.REDUCED, State.OWNED):
                return results[0], None
            return torch.stack(results), 0

    # torch asks for it at every call, and would build it anew
    Primitive.forward.__signature__ = inspect.signature(Primitive.forward)  # type: ignore[attr-defined]
    named = type(operation.title().replace("_", ""), (Primitive,), {})  # autograd's graph shows the name
    assert issubclass(named, Primitive)
    APPLY[operation] = quick_apply(named)


def _no_derivative(operation: str, axes: AxisNames) -> NotDifferentiableError:
    return NotDifferentiableError(
        f"{operation} over {axes}: it has no derivative; where the value acts as a constant (a softmax's maximum) "
        f"write fp.{operation}(x.detach(), ...)"
    )


def _values_of_ranks(call: CollectiveCall, dim: int | None, size: int) -> list[Tensor]:
    if dim is not None:
        _refuse_varying(call)
        return list(call.operand.unbind(dim))
    if call.kind != "pcast" and "unreduced" in call.states.values():
        axis = call.axes[0]
        raise CollectiveTypeError(
            f"{call.kind} over axis {axis!r} of partial sums that are the same on all ranks of this vmap level. In "
            f"a backward this is a Reduced value that was cast as if it were Invariant; say what it is: "
            f"fp.pcast(x, {axis!r}, to='varying', src='reduced')"
        )
    return [call.operand] * size


def _refuse_varying(call: CollectiveCall) -> None:
    """Raise for a varying operand that must be Invariant. A gradient after a forgotten pvary is also caught here."""
    casts_an_invariant = call.kind == "pcast" and source_of_cast(str(call.src), str(call.dst)) == "invariant"
    if call.kind == "pscatter" or casts_an_invariant:
        axis, what = call.axes[0], f"pcast to {call.dst}" if casts_an_invariant else "pscatter"
        raise CollectiveTypeError(
            f"{what} over axis {axis!r}: the operand varies along this vmap level, but must be the same on all its "
            f"ranks. In a backward this is the gradient of an Invariant value that met a Varying one; write "
            f"fp.pvary(x, {axis!r}) on the Invariant value where they meet"
        )


def source_of_cast(src: str, dst: str) -> str:
    return ("varying" if dst == "unreduced" else "invariant") if src == "auto" else src
