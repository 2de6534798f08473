"""Several tensors that travel as one: an algorithm that copies what it sends packs them where it sends from.

And one that adds what it receives may write the sums over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ...ops import packed, run_of

__all__ = ["ConcatReader", "LazyBucket", "to_tensor"]


class ConcatReader:
    """Tensors that lie one behind the other along their last dim, to be gone through once, from front to back.

    >>> tensors = EndToEnd([torch.tensor([1, 2, 3]), torch.tensor([4])])
    >>> tensors.next(2), tensors.next(2)
    ([tensor([1, 2])], [tensor([3]), tensor([4])])

    Args:
        tensors: asked for one by one, as they are come to, and let go of when they are passed.
    """

    __slots__ = ("_current", "_done", "_rest")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._rest = iter(tensors)
        self._current: Tensor | None = None
        self._done = 0  # elements of the current one

    def next(self, length: int) -> list[Tensor]:
        """The stretches that make the next so many elements; none is empty."""
        found = []
        while length > 0:
            current = next(self._rest) if self._current is None else self._current
            size = current.shape[-1]
            taken = min(length, size - self._done)
            if taken > 0:
                found.append(current if taken == size else current.narrow(-1, self._done, taken))
            length, self._done = length - taken, self._done + taken
            self._current = current
            if self._done == size:
                self._current, self._done = None, 0
        return found


class LazyBucket:
    """What `fp.pack` would make of tensors, before any of them is copied. They are let go of when they are packed.

    >>> Packed([torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6])], 2, [1, 0]).whole()
    tensor([1, 3, 5, 2, 4, 6])

    Args:
        tensors: at least one, of one dtype, on one device.
        parts: how many equal runs it is made of, one per rank.
        dims: per tensor, along which dim it is cut in parts.
        given_up: per tensor, whether nothing else needs what lies there; None is that all are still needed.

    Attributes:
        tensors: until they are packed.
        parts, shape, dtype, device, nbytes: of the whole, which is flat.
        length: elements of a run.
    """

    __slots__ = ("_dims", "_given_up", "_runs", "device", "dtype", "length", "nbytes", "parts", "shape", "tensors")

    def __init__(
        self, tensors: Sequence[Tensor], parts: int, dims: Sequence[int], given_up: Sequence[bool] | None = None
    ) -> None:
        self.tensors, self.parts, self._dims = tensors, parts, dims
        self._given_up = [False] * len(tensors) if given_up is None else given_up
        self._runs = ConcatReader(_runs_of(deque(tensors), parts, dims))
        self.dtype, self.device = tensors[0].dtype, tensors[0].device
        self.shape = torch.Size([sum(x.numel() for x in tensors)])
        self.nbytes, self.length = self.shape.numel() * self.dtype.itemsize, self.shape.numel() // parts

    def empty(self, length: int | None = None) -> Tensor:
        """Flat memory, for the whole or for so many elements."""
        return torch.empty(self.shape if length is None else length, dtype=self.dtype, device=self.device)

    def results(self) -> list[Tensor]:
        """Flat memory as large as each tensor: its own, where it is given up and lies in one stretch."""
        return [
            x.detach().view(-1) if given_up and x.is_contiguous() else self.empty(x.numel())
            for x, given_up in zip(self.tensors, self._given_up, strict=True)
        ]

    def write(self, runs: Sequence[Tensor]) -> None:
        """Pack the next elements of each run into flat memory, as many as it has room for."""
        self.tensors = ()
        if pieces := self._runs.next(runs[0].numel()):
            for run, piece in zip(runs, zip(*(x.unbind() for x in pieces), strict=True), strict=True):
                torch.cat(piece, out=run)

    def whole(self) -> Tensor:
        """Pack into memory of their own."""
        tensors, self.tensors = self.tensors, ()
        self._runs = ConcatReader(())
        return packed(tensors, self.parts, self._dims)


def _runs_of(tensors: deque[Tensor], parts: int, dims: Sequence[int]) -> Iterator[Tensor]:
    """Each tensor's part of every run; nothing is kept of those that were asked for."""
    for dim in dims:
        yield run_of(tensors.popleft(), parts, dim)


def to_tensor(x: Tensor | LazyBucket) -> Tensor:
    """As a tensor."""
    return x.whole() if isinstance(x, LazyBucket) else x
