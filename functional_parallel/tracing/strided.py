"""`as_strided` in a trace: slices of its operand in another order, or an index into the elements of the operand.

The graph then contains only ops on values. A program may store the operand with other strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from .. import _torch
from ..errors import MemoryLayoutError
from ..ir import current_source
from .writer import TraceWriter

aten = torch.ops.aten


def strided(
    recording: TraceWriter,
    x: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    """Record `as_strided` of a tensor without wrappers as ops on its elements.

    Return a view of the operand's memory with the requested strides. It is bound to the node with the elements.
    """
    with recording.unrolling():
        found = strided_elements(x, size, stride, storage_offset)
    recording.layouts.require_known(x, "as_strided", storage_offset is not None)
    view: torch.Tensor = aten.as_strided.default(x, size, stride, storage_offset)
    recording.bind(view, recording.node_of(found))
    return view


def strided_elements(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    """Return the values of `x.as_strided(size, stride, storage_offset)`, from slices of x or by an index."""
    memory = _Storage.of(x, storage_offset)
    size, stride = [int(each) for each in size], [int(each) for each in stride]
    if len(size) != len(stride):
        raise ValueError(f"as_strided: size {tuple(size)} and stride {tuple(stride)} must have the same length")
    memory.check(size, stride)
    view = memory.view(size, stride)
    if view is not None:
        return view
    kept = memory.leading(size, stride)
    flat = memory.elements.reshape(*size[:kept], -1)
    rest, steps = size[kept:], stride[kept:]
    if steps == _contiguous(rest) and memory.is_dense:
        return flat.narrow(kept, memory.start, prod(rest)).reshape(size)
    return flat[..., memory.position(_grid(rest, steps, memory.start, x.device), kept)]


def _grid(size: Sequence[int], stride: Sequence[int], start: int, device: torch.device | str) -> torch.Tensor:
    grid = torch.full((), start, dtype=torch.int64, device=device)
    for dim, (extent, step) in enumerate(zip(size, stride, strict=True)):
        ahead = torch.arange(extent, device=device) * step
        grid = grid + ahead.reshape([-1 if each == dim else 1 for each in range(len(size))])
    return grid


def _contiguous(size: Sequence[int]) -> list[int]:
    return [prod(size[dim + 1 :]) for dim in range(len(size))]


_MOST = 1 << 24  # positions that are checked individually


@dataclass(frozen=True)
class _Storage:
    elements: torch.Tensor
    strides: tuple[int, ...]
    start: int  # position of the view's first element, counted from the first element of the tensor

    @staticmethod
    def of(x: torch.Tensor, storage_offset: int | None) -> _Storage:
        start = 0 if storage_offset is None else int(storage_offset) - int(x.storage_offset())
        strides = x.stride()
        for dim, step in enumerate(strides):
            if step == 0 and x.shape[dim] > 1:  # an expanded dim has one element in memory
                x = x.narrow(dim, 0, 1)
        order = sorted(range(x.ndim), key=lambda dim: (x.shape[dim] > 1, -strides[dim]))
        return _Storage(x.permute(order), tuple(strides[dim] for dim in order), start)

    @property
    def is_dense(self) -> bool:
        sizes = self.elements.shape
        return all(
            extent == 1 or step == dense
            for extent, step, dense in zip(sizes, self.strides, _contiguous(sizes), strict=True)
        )

    def check(self, size: Sequence[int], stride: Sequence[int]) -> None:
        last = self.start + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
        if 0 in size:
            return
        inside = self.start >= 0 and min(stride, default=0) >= 0
        if inside and self.is_dense:
            inside = last < self.elements.numel()
        elif inside:
            self._check_nested()
            inside = prod(size) <= _MOST and self._holds_all(size, stride)
        if not inside:
            raise MemoryLayoutError(
                f"{current_source() or 'the function'}: as_strided({tuple(size)}, {tuple(stride)}) reads memory from "
                f"{self.start} to {last}, outside of its tensor's {self.elements.numel()} elements; call it on its base"
            )

    def _check_nested(self) -> None:
        reach = 1
        for extent, step in reversed(list(zip(self.elements.shape, self.strides, strict=True))):
            if extent > 1 and step < reach:
                raise MemoryLayoutError(
                    f"{current_source() or 'the function'}: as_strided of interleaved elements, with strides "
                    f"{self.strides} and shape {tuple(self.elements.shape)}; call it on the base of this view"
                )
            reach += step * (extent - 1)  # the elements of the inner dims are below

    def _holds_all(self, size: Sequence[int], stride: Sequence[int]) -> bool:
        with _torch.disable_functorch(), _torch.disable_torch_function():
            left, inside = _grid(size, stride, self.start, "cpu"), True
            for extent, step in zip(self.elements.shape, self.strides, strict=True):
                if extent > 1:
                    inside, left = inside and bool((left // step < extent).all()), left % step
            return inside and not bool(left.any())

    def view(self, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor | None:
        """Return the view as slices of the dims in another order, so that writes work. None for other views."""
        if not self.is_dense or 0 in size:
            return None
        x, left, dim_of = self.elements, self.start, dict[int, int]()
        wanted = [dim for dim, extent in enumerate(size) if extent > 1]
        for dim, (extent, dense) in enumerate(zip(x.shape, self.strides, strict=True)):
            if extent == 1:
                continue
            first, left = divmod(left, dense)
            steps = {each: stride[each] // dense for each in wanted if each not in dim_of and stride[each] % dense == 0}
            fitting = [each for each, step in steps.items() if step and first + (size[each] - 1) * step < extent]
            if fitting:
                step, count = steps[fitting[0]], size[fitting[0]]
                dim_of[fitting[0]] = dim
            else:
                step, count = 1, 1
            x = aten.slice.Tensor(x, dim, first, first + (count - 1) * step + 1, step)
        if len(dim_of) < len(wanted):
            return None
        order = [dim_of[each] for each in wanted]
        return x.permute(order + [dim for dim in range(x.ndim) if dim not in order]).view(list(size))

    def leading(self, size: Sequence[int], stride: Sequence[int]) -> int:
        if not self.is_dense or 0 in size:
            return 0
        kept = 0
        for extent, step in zip(self.elements.shape, self.strides, strict=True):
            rest = self.start + sum((n - 1) * s for n, s in zip(size[kept + 1 :], stride[kept + 1 :], strict=True))
            if kept >= len(size) or (size[kept], stride[kept]) != (extent, step) or rest >= step:
                break
            kept += 1
        return kept

    def position(self, memory: torch.Tensor, kept: int) -> torch.Tensor:
        """Return the index of the elements at positions in memory, counted without the `kept` leading dims."""
        if self.is_dense:
            return memory
        found, left = torch.zeros_like(memory), memory
        for extent, step in zip(self.elements.shape, self.strides, strict=True):
            if extent > 1:
                found, left = found * extent + torch.div(left, step, rounding_mode="floor"), left % step
        return found
