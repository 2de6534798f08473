"""Block quantiser: integers of few bits, with one float32 scale for each block of consecutive elements.

The scale of a block is its largest absolute value divided by 2^(bits-1) - 1, so the integers are symmetric about zero.
An element changes by at most half of the scale, plus the rounding of its dtype. A block with a value that is not finite
becomes NaN as a whole, so an overflow remains visible.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_BITS = {"int8": 8, "int4": 4}
IDENTITY = "identity"
WIRE_FORMATS = (*_BITS, IDENTITY)
_SMALLEST = 2.0**-126  # scale of a block of zeros, or of subnormal numbers: their error is at most half of it
_INWARD = 1 - 2.0**-22  # a scale is rounded towards zero, so that its largest multiple does not overflow


@dataclass(frozen=True)
class BlockFormat:
    """Integers of some bits in blocks; `str` is its text, such as "int8/64"."""

    integers: str
    block: int

    def __str__(self) -> str:
        return f"{self.integers}/{self.block}"

    @property
    def bits(self) -> int:
        return _BITS[self.integers]

    @property
    def largest(self) -> int:
        result: int = 2 ** (self.bits - 1) - 1
        return result

    def blocks(self, length: int) -> int:
        return -(-length // self.block)

    def value_bytes(self, length: int) -> int:
        """Bytes of the integers of some consecutive elements. Of an odd number in 4 bits, the last has its own byte."""
        return -(-length * self.bits // 8)

    def nbytes(self, lengths: Sequence[int]) -> int:
        """Bytes of values of these numbers of elements, each in its own blocks."""
        return sum(4 * self.blocks(length) + self.value_bytes(length) for length in lengths)

    def quantised(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return the integers of blocks, which are the last dim, in int8, and the scales, with a last dim of 1."""
        wide = blocks if blocks.dtype == torch.float64 else blocks.float()
        scale = self.scale(wide.abs().amax(-1, keepdim=True))
        return self.integers_of(wide, scale), scale

    def scale(self, largest: Tensor) -> Tensor:
        """Return the float32 scale of a block from its largest absolute value; NaN if that is not finite."""
        scale = (largest * (_INWARD / self.largest)).float().clamp(min=_SMALLEST)
        return torch.where(torch.isfinite(scale), scale, torch.nan)

    def integers_of(self, x: Tensor, scale: Tensor) -> Tensor:
        integers = (x / scale).round().clamp(-self.largest, self.largest)
        return torch.nan_to_num(integers).to(torch.int8)


@lru_cache
def block_format(text: str) -> BlockFormat | None:
    """Parse the text of a format. None for the identity, which keeps all bits.

    >>> block_format("int4/64").nbytes([130])  # three scales
    77
    """
    if text == IDENTITY:
        return None
    found = re.fullmatch(r"(int\d+)/(\d+)", text)
    if found is None or found[1] not in _BITS or int(found[2]) < 2 or int(found[2]) % 2:
        raise ValueError(f"{text!r} is no format: write 'int8/64', 'int4/64' with any even block, or 'identity'")
    return BlockFormat(found[1], int(found[2]))


def packed_integers(integers: Tensor, bits: int) -> Tensor:
    """Return the bytes of int8 values of so many bits along the last dim; of 4 bits, its length is even."""
    if bits == 8:
        return integers.view(torch.uint8)
    low, high = integers.view(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    packed: Tensor = (low & 15) | (high << 4)
    return packed


def unpacked_integers(packed: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed.view(torch.int8)
    both: Tensor = torch.stack((packed << 4, packed & 240), -1).flatten(-2).view(torch.int8)
    return both.bitwise_right_shift(4)  # with the sign


def padded_runs(rows: Tensor, lengths: Sequence[int], unit: int) -> Tensor:
    """Pad each run of a row, with these lengths, to a multiple of a unit."""
    if all(length % unit == 0 for length in lengths):
        return rows
    return torch.cat([pad(run, (0, -run.shape[-1] % unit)) for run in rows.split(list(lengths), -1)], -1)


def cut_runs(rows: Tensor, lengths: Sequence[int], unit: int) -> Tensor:
    """Undo `padded_runs`."""
    if all(length % unit == 0 for length in lengths):
        return rows
    runs = rows.split([-(-length // unit) * unit for length in lengths], -1)
    return torch.cat([run[..., :length] for run, length in zip(runs, lengths, strict=True)], -1)
