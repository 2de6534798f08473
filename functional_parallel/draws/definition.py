"""Definition of the draws: SplitMix64 (Steele, Lea & Flood, OOPSLA 2014) of key and position, in torch's int64 ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .positions import Positions, positions

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)

_DIGITS = {torch.float64: 53, torch.float32: 24}

Where = tuple[Tensor, Sequence[int], Sequence[int], Sequence[int], Sequence[Tensor]]


def places(like: Tensor, key: Tensor, shape: Sequence[int], axes: Sequence[str], splits: Sequence[int]) -> Where:
    first, place = positions(like, shape, axes, splits)
    seeds = key if isinstance(first, int) and first == 0 else key + first * GOLDEN
    seeds = seeds if seeds.device == like.device else seeds.to(like.device)  # torch copies within an abstract device
    return seeds, list(like.shape), place.sizes, place.strides, place.tables


def defined(
    seeds: Tensor,
    shape: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    tables: Sequence[Tensor],
    dtype: torch.dtype,
    p: float | None = None,
) -> Tensor:
    place = Positions(sizes, strides, tables).of_digits(seeds.device).reshape(list(shape))
    return numbers(place * GOLDEN + seeds.reshape([*seeds.shape, *[1] * len(shape)]), dtype, p)


def numbers(x: Tensor, dtype: torch.dtype, p: float | None) -> Tensor:
    digits, least = digits_of(dtype, p)
    whole = _shifted(mixed(mixed(x)), 64 - digits)
    return (whole.to(torch.float64) * 2.0**-digits).to(dtype) if least is None else whole >= least


def digits_of(dtype: torch.dtype, p: float | None) -> tuple[int, int | None]:
    """Return the number of binary digits that a draw has, and the least integer of these digits that is p, scaled."""
    if p is None:
        return _DIGITS.get(dtype, 8), None  # digits of every number of the dtype in [0, 1)
    if dtype in (torch.float64, torch.complex128):
        return 53, math.ceil(p * 2.0**53)
    return 24, math.ceil(torch.tensor(p, dtype=torch.float32, device="cpu").item() * 2.0**24)


def mixed(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to int64. Its multiplication wraps around."""
    x = (x ^ _shifted(x, 30)) * MIX_1
    x = (x ^ _shifted(x, 27)) * MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right logically. torch's shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
