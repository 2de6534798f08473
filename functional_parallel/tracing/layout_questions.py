"""torch functions that depend on the strides or memory of a tensor, or that return either a view or a copy.

They use the strides of the fake tensor, so the recording depends on these strides (see `memory_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import Argument

from .. import _torch
from ..errors import MemoryLayoutError
from ..ir import Traced, current_source
from .interception import Replaced, intercept, intercept_op
from .memory_layout import require_contiguous
from .record import Recorder, recorder
from .strided import strided_elements

aten = torch.ops.aten


def depends_on_layouts(traced: Traced, arguments: Sequence[Tensor | None], paths: Sequence[str]) -> None:
    """Check the arguments that a trace requires to be contiguous, and record the dependency in the enclosing trace.

    Arguments may be wrapped by torch.func's transforms. None skips the check of an input.
    """
    for index, read in traced.layout_reads.items():
        x = arguments[index]
        if x is None:
            continue
        found = _recording_of(x)
        with _torch.disable_torch_function():
            require_contiguous(x, read, paths[index])
        if found is not None:
            found[0].layouts.require_read(found[1], read)


def _recording_of(x: Argument) -> tuple[Recorder, Tensor] | None:
    active = recorder()
    plain = _torch.unwrap(x) if isinstance(x, Tensor) else None
    return (active, plain) if active is not None and isinstance(plain, _torch.FakeTensor) else None


def _question(function: Callable[..., Any], offset: bool = False) -> None:
    name = function.__name__

    def answer(x: Tensor, *args: Argument, **kwargs: Argument) -> Replaced:
        found = _recording_of(x)
        if found is not None:
            found[0].layouts.require_known(found[1], f"Tensor.{name}()", offset)
        return NotImplemented

    intercept(function, always=True)(answer)


for _name in ("stride", "is_contiguous", "dim_order"):
    _question(getattr(Tensor, _name))
for _name in ("storage_offset", "untyped_storage", "is_set_to"):
    _question(getattr(Tensor, _name), offset=True)


@intercept(Tensor.data_ptr, always=True)
def _data_ptr(x: Tensor) -> Replaced:
    if _recording_of(x) is None:
        return NotImplemented
    raise MemoryLayoutError(
        f"{current_source() or 'the function'}: data_ptr() of a traced tensor of shape {tuple(x.shape)}, which has no "
        "memory; compare tensors by `is`, or read the address outside of the function"
    )


# --- A view or a copy ---


def _view_or_copy(function: Callable[..., Any]) -> None:
    name = function.__name__

    def replacement(x: Tensor, *args: Argument, **kwargs: Argument) -> Argument:
        found = _recording_of(x)
        result = function(x, *args, **kwargs)
        if found is not None and isinstance(result, Tensor):
            found[0].layouts.pair(found[1], _torch.unwrap(result), name)
        return result

    intercept(function, always=True, same_strides=True)(replacement)


for _name in ("contiguous", "reshape", "reshape_as", "flatten", "ravel"):
    _view_or_copy(getattr(Tensor, _name))
for _name in ("reshape", "flatten", "ravel"):
    _view_or_copy(getattr(torch, _name))


# --- as_strided ---


def _as_strided(function: Callable[..., Any], is_view: bool = True) -> None:
    def replacement(
        input: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
    ) -> Replaced:
        """Replace the call under a derivative, where torch's own writes into views of new memory."""
        # Elsewhere `strided` records the op.
        found = _recording_of(input)
        if found is None or not _torch.differentiating_level():
            return NotImplemented
        layouts, plain = found[0].layouts, found[1]
        layouts.require_known(plain, function.__name__, storage_offset is not None)
        result = strided_elements(input, size, stride, storage_offset)
        layouts.leave_unknown(result, (), "as_strided (under a derivative)")
        if is_view:
            layouts.pair(plain, _torch.unwrap(result), "as_strided", surely=True)
        return result

    intercept(function, always=True, same_strides=True)(replacement)


_as_strided(Tensor.as_strided)
_as_strided(torch.as_strided)
_as_strided(torch.as_strided_copy, is_view=False)


@intercept_op(aten.as_strided_copy.default)
def _as_strided_copy(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    copy: Tensor = aten.clone.default(aten.as_strided.default(x, size, stride, storage_offset))
    return copy


@intercept_op(aten.as_strided_scatter.default)
def _as_strided_scatter(
    x: Tensor, src: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    """Write by an index. `as_strided` of the numbered elements of x gives the numbers of the written elements."""
    active = recorder()
    assert active is not None
    active.layouts.require_known(x, "as_strided_scatter", storage_offset is not None)
    offset = None if storage_offset is None else storage_offset - x.storage_offset()
    with active.unrolling():
        numbers = torch.empty_strided(x.shape, x.stride(), dtype=torch.int64, device=x.device)
        numbers = numbers.copy_(torch.arange(x.numel(), device=x.device).reshape(x.shape))
        written = numbers.as_strided(size, stride, offset).reshape(-1)
        return x.reshape(-1).index_put((written,), src.reshape(-1)).reshape(x.shape)
