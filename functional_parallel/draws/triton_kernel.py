"""Triton kernel of the draws. It has the bits of an element in registers, and writes only the draws."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .definition import GOLDEN, MIX_1, MIX_2
from .positions import Positions

_BLOCK = 1024
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)


def draw_(out: Tensor, seeds: Tensor, place: Positions, digits: int, least: int | None) -> None:
    layout, offset = [], 0
    for size, stride in zip(place.sizes, place.strides, strict=True):
        layout += [size, stride, -1 if stride else offset]
        offset += 0 if stride else size
    layout[0] = 0  # the size of the outermost dim has no effect on the code
    each = out.numel() // seeds.numel()
    blocks = triton.cdiv(each, _BLOCK)
    with torch.cuda.device_of(out):  # triton launches on the current device
        _draw[(blocks * seeds.numel(),)](
            out.view(torch.uint8) if out.dtype == torch.bool else out,
            seeds.contiguous(),
            torch.cat(list(place.tables)) if place.tables else seeds,
            each,
            blocks,
            LAYOUT=tuple(layout),
            DIGITS=digits,
            LEAST=-1 if least is None else least,
            WIDE=each >= 2**31 - _BLOCK,
            BLOCK=_BLOCK,
        )


@triton.jit
def _mixed(x):  # the masks make the shifts logical
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _draw(
    out,
    seeds,
    tables,
    each,
    blocks,
    LAYOUT: tl.constexpr,  # for each digit of a position: size, stride, and offset of its table or -1
    DIGITS: tl.constexpr,
    LEAST: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    key = tl.program_id(0) // blocks
    index = (tl.program_id(0) % blocks).to(tl.int64 if WIDE else tl.int32) * BLOCK + tl.arange(0, BLOCK)
    inside = index < each
    rest, position = index, (index * 0).to(tl.int64)
    for place in tl.static_range(len(LAYOUT) - 3, -1, -3):
        digit = rest % LAYOUT[place] if place > 0 else rest
        if LAYOUT[place + 2] >= 0:
            position += tl.load(tables + LAYOUT[place + 2] + digit, mask=inside, other=0)
        else:
            position += digit.to(tl.int64) * LAYOUT[place + 1]
        if place > 0:
            rest = rest // LAYOUT[place]
    x = _mixed(_mixed(position * _GOLDEN + tl.load(seeds + key)))
    whole = (x >> (64 - DIGITS)) & ((1 << DIGITS) - 1)
    where = out + key.to(tl.int64) * each + index
    if LEAST >= 0:
        tl.store(where, (whole >= LEAST).to(tl.uint8), mask=inside)
    elif DIGITS == 53:
        tl.store(where, whole.to(tl.float64) * 2.0**-53, mask=inside)
    else:
        tl.store(where, (whole.to(tl.float32) * (2.0**-DIGITS)).to(out.dtype.element_ty), mask=inside)
