"""Into which parts an axis cuts a dim.

The ranks of a mesh take equal parts. Microbatches need not: of 11 samples 4 microbatches take 3, 3, 3 and 2. Every part
is still held in one shape, so that one program serves all: a part that is one sample short begins one sample early,
with the last sample of the part before. That sample is then there twice, and whatever sums over samples counts its
second copy for nothing (`rules.duplicates`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["DimSplit"]


@dataclass(frozen=True)
class DimSplit:
    """A dim of `samples`, or a multiple of it, cut for `ranks`.

    >>> parts = Parts.of(4, 11)
    >>> parts.rows, [parts.length(index) for index in range(4)], [parts.start(index) for index in range(4)]
    (3, [3, 3, 3, 2], [0, 3, 6, 8])
    >>> parts.local(22), parts.whole(6), Parts.of(4, 12).local(12)
    (6, 22, 3)

    Attributes:
        ranks: how many parts.
        samples: what cannot be cut further: as many as ranks, each a part, unless the cut is uneven.
    """

    ranks: int
    samples: int

    @classmethod
    def of(cls, ranks: int, samples: int | None = None) -> DimSplit:
        """Parts of so many samples; equal ones if the ranks divide them, or nothing is said."""
        return cls(ranks, ranks) if samples is None or samples % ranks == 0 else cls(ranks, samples)

    @property
    def is_even(self) -> bool:
        """Whether all parts are equal."""
        return self.samples == self.ranks

    @property
    def rows(self) -> int:
        """The samples that every rank holds, one of them twice where its part is short."""
        return -(-self.samples // self.ranks)

    @property
    def full(self) -> int:
        """How many parts are not short; they come first."""
        return self.samples % self.ranks or self.ranks

    def divide(self, extent: int) -> bool:
        """Whether a dim of this extent can be cut so."""
        return extent % self.samples == 0

    def local(self, extent: int) -> int:
        """The extent that a rank holds of a whole one."""
        return extent // self.samples * self.rows

    def whole(self, extent: int) -> int:
        """The whole extent of which a rank holds this one."""
        return extent // self.rows * self.samples

    def length(self, index: int) -> int:
        """The samples of a part."""
        return self.rows - (index >= self.full)

    def start(self, index: Any) -> Any:
        """The first sample that a rank holds; the rank a number, or a tensor."""
        if self.is_even:
            return index
        short = index - (self.full - 1)
        return index * self.rows - (max(short, 0) if isinstance(short, int) else short.clamp(min=0))

    def whole_position(self, position: Any, index: Any, extent: int, outer: int = 1) -> Any:
        """Where in the whole dim a position lies that a rank holds; numbers, or tensors.

        >>> parts, held = Parts.of(2), [0, 1, 2, 3]     # rank 1's halves of two blocks of 4
        >>> [parts.whole_position(position, 1, 4, outer=2) for position in held]
        [2, 3, 6, 7]

        Args:
            position: where in what the rank holds.
            index: the rank.
            extent: how much of the dim it holds.
            outer: of how many blocks of the dim it holds its part.
        """
        block = extent // outer
        ahead, inside = (0, position) if outer == 1 else (position // block * self.whole(block), position % block)
        return ahead + self.start(index) * (block // self.rows) + inside

    def held_position(self, position: Any, index: Any, extent: int, outer: int = 1) -> tuple[Any, Any]:
        """Where a position of the whole lies in what a rank holds, and whether it does; if not, just any number.

        >>> parts, whole = Parts.of(2), [2, 3, 4, 7]
        >>> [parts.held_position(position, 1, 4, outer=2) for position in whole]
        [(0, True), (1, True), (2, False), (3, True)]

        Args:
            position: where in the whole dim, or beyond it.
            index, extent, outer: as for `whole_position`.
        """
        block = extent // outer
        offset = position - self.start(index) * (block // self.rows)
        if outer == 1:
            return offset, (offset >= 0) & (offset < extent)
        whole = self.whole(block)
        inside = offset % whole
        held = (offset >= 0) & (offset < outer * whole) & (inside < block)
        return offset // whole * block + inside, held

    def held(self, index: int, extent: int) -> tuple[int, int]:
        """Begin and end of what a rank holds, in a dim of which it holds `extent`."""
        begin = self.start(index) * (extent // self.rows)
        return begin, begin + extent

    def own(self, index: int, extent: int) -> tuple[int, int]:
        """Begin and end, in the extent that a rank holds, of what no rank before it holds."""
        return (self.rows - self.length(index)) * (extent // self.rows), extent

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.ranks))
