"""Split of a dim over the ranks of an axis.

The ranks of a mesh get equal chunks. Microbatches may be unequal: 4 microbatches of 11 samples get 3, 3, 3 and 2. All
chunks are stored with one shape: a short one starts one sample early, with the last sample of the previous chunk.
Every sum over samples counts this second copy as zero (`rules.duplicates`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from torch import Tensor

from sharding_specs.blocks import Blocks, lengths

Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True)
class DimSplit:
    """Split of a dim of size `samples`, or of a multiple of it, over `ranks`.

    >>> parts = DimSplit.of(4, 11)
    >>> parts.rows, [parts.length(index) for index in range(4)], [parts.start(index) for index in range(4)]
    (3, [3, 3, 3, 2], [0, 3, 6, 8])
    >>> parts.local(22), parts.whole(6), DimSplit.of(4, 12).local(12)
    (6, 22, 3)
    """

    ranks: int
    samples: int  # indivisible units. It equals `ranks`, with one unit per chunk, unless the split is uneven.

    @classmethod
    def of(cls, ranks: int, samples: int | None = None) -> DimSplit:
        """Return the split of `samples` over `ranks`; even if `ranks` divides `samples`, or if `samples` is None."""
        return cls(ranks, ranks) if samples is None or samples % ranks == 0 else cls(ranks, samples)

    @property
    def is_even(self) -> bool:
        return self.samples == self.ranks

    @property
    def rows(self) -> int:
        """Number of samples that every rank stores, including the duplicate of a short chunk."""
        return -(-self.samples // self.ranks)

    @property
    def full(self) -> int:
        """Number of chunks that are not short. They precede the short ones."""
        return self.samples % self.ranks or self.ranks

    def divide(self, extent: int) -> bool:
        return extent % self.samples == 0

    def local(self, extent: int) -> int:
        """Return the local size of a dim of global size `extent`."""
        return extent // self.samples * self.rows

    def whole(self, extent: int) -> int:
        """Return the global size of a dim of local size `extent`."""
        return extent // self.rows * self.samples

    def length(self, index: int) -> int:
        """Return the number of samples of chunk `index`, without the duplicate."""
        return self.rows - (index >= self.full)

    def start(self, index: Position) -> Position:
        """Return the first sample that rank `index` stores. `index` is a number or a tensor."""
        if self.is_even:
            return index
        short = index - (self.full - 1)
        return index * self.rows - (max(short, 0) if isinstance(short, int) else short.clamp(min=0))

    def whole_position(self, position: Position, index: Position, extent: int, outer: int = 1) -> Position:
        """Return the global position (number or tensor) of a position in rank `index`'s shard of `outer` blocks."""
        block = extent // outer
        ahead = 0 if outer == 1 else position // block * self.whole(block)
        inside = position if outer == 1 else position % block
        return ahead + self.start(index) * (block // self.rows) + inside

    def held_position(
        self, position: Position, index: Position, extent: int, outer: Blocks = 1
    ) -> tuple[Position, Position]:
        """Return the local position of a global position (arbitrary if elsewhere), and whether the rank stores it."""
        if isinstance(outer, tuple):
            return self._held_in_blocks(position, index, lengths(outer, extent))
        block = extent // outer
        offset = position - self.start(index) * (block // self.rows)
        if outer == 1:
            return offset, (offset >= 0) & (offset < extent)
        whole = self.whole(block)
        inside = offset % whole
        held = (offset >= 0) & (offset < outer * whole) & (inside < block)
        return offset // whole * block + inside, held

    def _held_in_blocks(self, position: Position, index: Position, sizes: list[int]) -> tuple[Position, Position]:
        found = held = position * 0
        for at, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
            offset = position - at * self.ranks - index * size
            is_inside = (offset >= 0) & (offset < size)
            found, held = found + is_inside * (at + offset), held + is_inside
        return found, held > 0

    def held(self, index: int, extent: int) -> tuple[int, int]:
        """Return begin and end, in the global dim, of the samples that a rank stores. `extent` is the local size."""
        begin = self.start(index) * (extent // self.rows)
        return begin, begin + extent

    def own(self, index: int, extent: int) -> tuple[int, int]:
        """Return begin and end, in the local dim, of the samples that no previous rank stores."""
        return (self.rows - self.length(index)) * (extent // self.rows), extent

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.ranks))
