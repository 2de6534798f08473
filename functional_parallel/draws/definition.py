"""Definition of the draws: SplitMix64 (Steele, Lea & Flood, OOPSLA 2014) of key and position, in torch's int64 ops."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .positions import all_values, positions

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)
STEPS = ((30, MIX_1), (27, MIX_2), (31, 1))  # x ← (x ⊕ (x shifted right by the first)) · the second

_DIGITS = {torch.float64: 53, torch.float32: 24}


def defined_uniform(
    like: Tensor, key: Tensor, shape: Sequence[int], axes: Sequence[str], splits: Sequence[int]
) -> Tensor:
    """Draw uniform numbers at this rank's positions of a tensor of global shape `shape`; see `positions`.

    Each of several keys gives separate numbers. The dims of `key` precede those of `like`.
    """
    digits = digits_of(like)
    return (_whole(digits, like, key, shape, axes, splits).to(torch.float64) * 2.0**-digits).to(like.dtype)


def defined_kept(
    like: Tensor, key: Tensor, shape: Sequence[int], axes: Sequence[str], splits: Sequence[int], p: float
) -> Tensor:
    """Whether uniform numbers of at least 24 binary digits, drawn as by `defined_uniform`, are not less than p."""
    digits, least = threshold(like, p)
    return _whole(digits, like, key, shape, axes, splits) >= least


def digits_of(like: Tensor) -> int:
    """Number of binary digits of a uniform number: those that every number of the dtype in [0, 1) has."""
    return _DIGITS.get(like.dtype, 8)


def threshold(like: Tensor, p: float) -> tuple[int, int]:
    """Return a number of binary digits, and the least integer of these digits that is not less than p, scaled alike."""
    if like.dtype in (torch.float64, torch.complex128):
        return 53, math.ceil(p * 2.0**53)
    return 24, math.ceil(torch.tensor(p, dtype=torch.float32, device="cpu").item() * 2.0**24)


def seeds(key: Tensor, first: int | Tensor, device: torch.device) -> Tensor:
    """Return the number that is added to the product of a position with the golden ratio, for each key."""
    return (key + first * GOLDEN).to(device)


def mixed(x: Tensor) -> Tensor:
    """Apply the finaliser of SplitMix64 to int64. Its multiplication wraps around."""
    for bits, factor in STEPS:
        x = (x ^ _shifted(x, bits)) * factor
    return x


def _whole(
    digits: int, like: Tensor, key: Tensor, shape: Sequence[int], axes: Sequence[str], splits: Sequence[int]
) -> Tensor:
    first, place = positions(like, shape, axes, splits)
    own = seeds(key, first, like.device).reshape([*key.shape, *[1] * len(shape)])
    return _shifted(mixed(mixed(all_values(place, like.device).reshape(like.shape) * GOLDEN + own)), 64 - digits)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right logically. torch's shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
