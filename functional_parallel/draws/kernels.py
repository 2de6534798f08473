"""Kernels of the draws, with the bits of their definition: blocks in the processor's cache, or one kernel on CUDA."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ir import in_main_memory
from .definition import GOLDEN, defined, digits_of, numbers
from .positions import Positions

_BLOCK = 1 << 16  # elements of a thread


def drawn(
    seeds: Tensor,
    shape: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    tables: Sequence[Tensor],
    dtype: torch.dtype,
    p: float | None = None,
) -> Tensor:
    by_triton = seeds.is_cuda and _has_triton() and (p is not None or dtype.is_floating_point)
    if not (by_triton or in_main_memory(seeds)):
        return defined(seeds, shape, sizes, strides, tables, dtype, p).contiguous()
    kind = dtype if p is None else torch.bool
    out = torch.empty([*seeds.shape, *shape], dtype=kind, device=seeds.device)
    place = Positions(sizes, strides, tables)
    if by_triton and out.numel():
        from .triton_kernel import draw_  # triton is optional, and slow to import

        draw_(out, seeds, place, *digits_of(dtype, p))
    elif out.numel():
        _draw_in_blocks_(out, seeds, place, dtype, p)
    return out


def _draw_in_blocks_(out: Tensor, seeds: Tensor, place: Positions, dtype: torch.dtype, p: float | None) -> None:
    rows = place.of_digits(seeds.device, end=-1) * GOLDEN
    size, stride = place.sizes[-1], place.strides[-1]
    block = _BLOCK * torch.get_num_threads()
    for seed, grid in zip(seeds.reshape(-1), out.view(seeds.numel(), len(rows), size), strict=True):
        for begin in range(0, size, block):
            end = min(begin + block, size)
            columns = torch.arange(begin, end) * stride if stride else place.tables[-1][begin:end]
            step = max(1, block // (end - begin))
            for row in range(0, len(rows), step):
                bits = rows[row : row + step, None] + (columns * GOLDEN + seed)
                grid[row : row + step, begin:end] = numbers(bits, dtype, p)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
