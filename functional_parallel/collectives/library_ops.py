"""Library ops: one `torch.ops.fp.*` per primitive, so that a trace shows each collective as one named node.

An op moves values and has no derivative; `primitives` defines the derivatives. `src` and `dst` name states of `types`,
or "auto", which the checker resolves. They do not change the values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import shapes
from .axes import axis_size, communicator_for
from .call import CollectiveCall, attributes, call_of
from .communicator import Communicator, Lane
from .types import Param

Target = Callable[..., Any] | str  # of a node in a graph

_library = torch.library.Library("fp", "DEF")
_names: dict[Target, str] = {}
_fakes: dict[Target, Callable[..., Tensor]] = {}


def primitive_of(op: Target) -> str | None:
    """Return the primitive of a library op, `"psum"` for `torch.ops.fp.psum.default`; None for other ops."""
    return _names.get(op)


def fake_kernel(op: Target) -> Callable[..., Tensor] | None:
    """Return the function that makes the result of a primitive without values; None for other ops."""
    return _fakes.get(op)


def _define(schema: str, fake: Callable[..., Tensor], kernel: Callable[..., Tensor] | None = None) -> None:
    name, more = schema.split("(")[0], "".join(f", str {each}={value!r}" for each, value in attributes().items())
    _library.define(schema.replace(") ->", f", *{more}) ->" if more else ") ->"))
    _library.impl(name, kernel or _carried(name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp::{name}", fake, lib=_library)
    if name != "axis_index":
        _library.impl(name, _underivable(name), "Autograd", with_keyset=True)
        _library.impl(name, _unbatchable(name), "FuncTorchBatched")
    op = getattr(torch.ops.fp, name).default
    _names[op], _fakes[op] = name, fake


def _underivable(name: str) -> Callable[..., Tensor]:
    """Reject a derivative of the raw op. torch would return zero without an error."""
    op = getattr(torch.ops.fp, name).default

    def kernel(keyset: torch._C.DispatchKeySet, x: Tensor, *params: Param, **sent: str) -> Tensor:
        if (x.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(x).tangent is not None:
            raise _raw(name, "no derivative")
        with torch._C._AutoDispatchBelowAutograd():
            result: Tensor = op.redispatch(keyset & torch._C._after_autograd_keyset, x, *params, **sent)
            return result

    return kernel


def _unbatchable(name: str) -> Callable[..., Tensor]:
    """Reject vmap of the raw op. torch's fallback would run one collective per entry, in an arbitrary order."""

    def kernel(*_: Tensor | Sequence[str] | Param, **__: str) -> Tensor:
        raise _raw(name, "no vmap rule")

    return kernel


def _raw(name: str, lacks: str) -> TypeError:
    return TypeError(
        f"torch.ops.fp.{name} is a node of a traced program and has {lacks}; call fp.{name}, or to interpret a traced "
        f"graph, collectives.apply_primitive({name!r}, ...)"
    )


def _carried(name: str) -> Callable[..., Tensor]:
    def kernel(*args: Tensor | Sequence[str] | Param, **_: str) -> Tensor:
        call = call_of(name, args)
        if axis_size(call.axes) == 1:
            return _identity(call)
        carried: Tensor = getattr(_carrier(name, call.axes), name)(call.operand, call.axes, **call.routing)
        return carried.contiguous()

    return kernel


def _identity(call: CollectiveCall) -> Tensor:
    """Result of a collective over one rank: a copy of its operand, or zeros for a permutation without pairs."""
    if call.kind == "ppermute" and not call.pairs:
        return torch.zeros_like(call.operand, memory_format=torch.contiguous_format)
    copy: Tensor = call.operand.clone(memory_format=torch.contiguous_format)
    return copy


def _carrier(name: str, axes: Sequence[str]) -> Communicator:
    communicator = communicator_for(name, axes)
    assert communicator is not None, (
        f"{name} over {tuple(axes)} met real tensors, but these axes are bound for tracing only"
    )
    assert not isinstance(communicator, Lane), f"{name} over {tuple(axes)} must reach the vmap level that they name"
    return communicator


def _same_shape(x: Tensor, axes: Sequence[str], *params: Param, **_: str) -> Tensor:
    axis_size(axes)
    return x.new_empty(x.shape)


def _chunk(name: str) -> Callable[..., Tensor]:
    return lambda x, axes, dim, *_, **__: x.new_empty(shapes.chunk_shape(name, x.shape, dim, axes))


def _gathered(name: str) -> Callable[..., Tensor]:
    return lambda x, axes, dim, *_, **__: x.new_empty(shapes.gathered_shape(name, x.shape, dim, axes))


def _exchanged(x: Tensor, axes: Sequence[str], split_dim: int, concat_dim: int, **_: str) -> Tensor:
    shape = shapes.chunk_shape("all_to_all", x.shape, split_dim, axes)
    return x.new_empty(shapes.gathered_shape("all_to_all", shape, concat_dim, axes))


def _pscatter(x: Tensor, axes: Sequence[str], dim: int, **_: str) -> Tensor:
    chunk = shapes.chunk_shape("pscatter", x.shape, dim, axes)[dim]
    index = 0 if axis_size(axes) == 1 else _carrier("pscatter", axes).axis_index(tuple(axes))
    return x.narrow(dim, index * chunk, chunk).clone(memory_format=torch.contiguous_format)


def _pcast(x: Tensor, axes: Sequence[str], src: str, dst: str, **_: str) -> Tensor:
    """Copy `x`. If the result shared memory with its operand, an in-place op could change the operand."""
    axis_size(axes)
    return x.clone(memory_format=torch.contiguous_format)


def _axis_index(axes: Sequence[str], **_: str) -> Tensor:
    index = 0 if axis_size(axes) == 1 else _carrier("axis_index", axes).axis_index(tuple(axes))
    return torch.tensor(index, device="cpu")


def _fake_axis_index(axes: Sequence[str], **_: str) -> Tensor:
    axis_size(axes)
    return torch.empty((), dtype=torch.int64, device="cpu")


_define("psum(Tensor x, str[] axes, str src) -> Tensor", _same_shape)
_define("psum_scatter(Tensor x, str[] axes, int dim, str src) -> Tensor", _chunk("psum_scatter"))
_define("all_gather(Tensor x, str[] axes, int dim, str dst) -> Tensor", _gathered("all_gather"))
_define("pscatter(Tensor x, str[] axes, int dim) -> Tensor", _chunk("pscatter"), _pscatter)
_define("all_to_all(Tensor x, str[] axes, int split_dim, int concat_dim) -> Tensor", _exchanged)
_define("ppermute(Tensor x, str[] axes, int[] pairs) -> Tensor", _same_shape)
_define("pmax(Tensor x, str[] axes) -> Tensor", _same_shape)
_define("pmin(Tensor x, str[] axes) -> Tensor", _same_shape)
_define("pbroadcast(Tensor x, str[] axes, int source) -> Tensor", _same_shape)
_define("broadcast(Tensor x, str[] axes, int owner, str dst) -> Tensor", _same_shape)
_define("scatter(Tensor x, str[] axes, int dim, int owner) -> Tensor", _chunk("scatter"))
_define("gather(Tensor x, str[] axes, int dim, int owner) -> Tensor", _gathered("gather"))
_define("reduce(Tensor x, str[] axes, int owner, str src) -> Tensor", _same_shape)
_define("pcast(Tensor x, str[] axes, str src, str dst) -> Tensor", _same_shape, _pcast)
_define("axis_index(str[] axes) -> Tensor", _fake_axis_index, _axis_index)
