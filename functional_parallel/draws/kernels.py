"""Kernels of the draws, with the bits of their definition: blocks in the processor's cache, or one kernel on CUDA."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..ir import in_main_memory
from .definition import GOLDEN, STEPS, defined_kept, defined_uniform, digits_of, seeds, threshold
from .positions import Digit, all_values, count, positions

_BLOCK = 1 << 16  # elements of a thread


def uniform(like: Tensor, key: Tensor, shape: Sequence[int], axes: Sequence[str], splits: Sequence[int]) -> Tensor:
    """Return `defined_uniform` of the same arguments, computed by a kernel for the device."""
    digits = digits_of(like)
    if _uses_triton(like) and like.is_floating_point():
        return _by_triton(like, key, like.dtype, digits, None, positions(like, shape, axes, splits))
    if not in_main_memory(like):
        return defined_uniform(like, key, shape, axes, splits)

    def write(whole: Tensor, out: Tensor) -> None:
        out.copy_(whole.to(torch.float64).mul_(2.0**-digits))

    return _in_blocks(like, key, like.dtype, 64 - digits, write, positions(like, shape, axes, splits))


def kept(
    like: Tensor, key: Tensor, shape: Sequence[int], axes: Sequence[str], splits: Sequence[int], p: float
) -> Tensor:
    """Return `defined_kept` of the same arguments, computed by a kernel for the device: one byte per element."""
    digits, least = threshold(like, p)
    if _uses_triton(like):
        return _by_triton(like, key, torch.bool, digits, least, positions(like, shape, axes, splits))
    if not in_main_memory(like):
        return defined_kept(like, key, shape, axes, splits, p)

    def write(whole: Tensor, out: Tensor) -> None:
        torch.ge(whole, least, out=out)

    return _in_blocks(like, key, torch.bool, 64 - digits, write, positions(like, shape, axes, splits))


def _in_blocks(
    like: Tensor,
    key: Tensor,
    dtype: torch.dtype,
    shift: int,
    write: Callable[[Tensor, Tensor], None],
    place: tuple[int | Tensor, list[Digit]],
) -> Tensor:
    """Draw block by block. `write` converts the bits of a block, without the lowest `shift`, to elements of `dtype`."""
    first, digits = place
    *outer, inner = digits or [Digit(1, 0)]
    out = torch.empty([*key.shape, *like.shape], dtype=dtype, device=like.device)
    if not out.numel():
        return out
    rows = all_values(outer, like.device) * GOLDEN
    block = _BLOCK * torch.get_num_threads()
    for seed, grid in zip(
        seeds(key, first, like.device).reshape(-1), out.view(-1, count(outer), inner.size), strict=True
    ):
        for columns in torch.arange(inner.size).split(block):
            begin, end = int(columns[0]), int(columns[-1]) + 1
            own = _part(inner, begin, end).mul_(GOLDEN).add_(seed)
            step = max(1, block // (end - begin))
            for row in range(0, len(rows), step):
                whole = rows[row : row + step, None] + own
                _mix_(whole)
                write(_shift_(whole, shift), grid[row : row + step, begin:end])
    return out


def _part(digit: Digit, begin: int, end: int) -> Tensor:
    if digit.table is not None:
        return digit.table[begin:end].clone()
    return torch.arange(begin, end).mul_(digit.stride)


def _mix_(x: Tensor) -> None:
    """Apply the finaliser twice, in place."""
    spare = torch.empty_like(x)
    for bits, factor in (*STEPS, *STEPS):
        torch.bitwise_right_shift(x, bits, out=spare)
        x ^= spare.bitwise_and_((1 << (64 - bits)) - 1)
        if factor != 1:
            x *= factor


def _shift_(x: Tensor, bits: int) -> Tensor:
    x >>= bits
    return x.bitwise_and_((1 << (64 - bits)) - 1)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _uses_triton(like: Tensor) -> bool:
    return like.is_cuda and _has_triton()


def _by_triton(
    like: Tensor,
    key: Tensor,
    dtype: torch.dtype,
    digits: int,
    least: int | None,
    place: tuple[int | Tensor, list[Digit]],
) -> Tensor:
    from .triton_kernel import draw_  # triton is optional, and slow to import

    out = torch.empty([*key.shape, *like.shape], dtype=dtype, device=like.device)
    if out.numel():
        draw_(out, seeds(key, place[0], like.device), place[1], digits, least)
    return out
