"""Tensors that are sent as one bucket, packed into the shared memory. An all-reduce may write the sums over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..ops import packed, run_of


class ConcatReader:
    """Reader of tensors that are concatenated along their last dim. It releases each tensor once it is read."""

    __slots__ = ("_current", "_done", "_rest")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._rest = iter(tensors)
        self._current: Tensor | None = None
        self._done = 0  # elements of the current one

    def next(self, length: int) -> list[Tensor]:
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
    """The result of `fp.pack`, before any tensor is copied. Packing releases the tensors.

    `given_up` tells whose memory may be overwritten; None means that all tensors are still needed.
    """

    __slots__ = ("_dims", "_given_up", "_runs", "device", "dtype", "length", "nbytes", "parts", "shape", "tensors")

    def __init__(
        self, tensors: Sequence[Tensor], parts: int, dims: Sequence[int], given_up: Sequence[bool] | None = None
    ) -> None:
        self.tensors, self.parts, self._dims = tensors, parts, dims
        self._given_up = [False] * len(tensors) if given_up is None else given_up
        self._runs = ConcatReader(_runs_of(deque(tensors), parts, dims))
        self.dtype, self.device = tensors[0].dtype, tensors[0].device
        # of the full bucket, which is flat, and of one run
        self.shape = torch.Size([sum(x.numel() for x in tensors)])
        self.nbytes, self.length = self.shape.numel() * self.dtype.itemsize, self.shape.numel() // parts

    def empty(self, length: int | None = None) -> Tensor:
        return torch.empty(self.shape if length is None else length, dtype=self.dtype, device=self.device)

    def results(self) -> list[Tensor]:
        """Return flat memory of the size of each tensor: its own memory if that is donated and contiguous."""
        return [
            x.detach().view(-1) if given_up and x.is_contiguous() else self.empty(x.numel())
            for x, given_up in zip(self.tensors, self._given_up, strict=True)
        ]

    def write(self, runs: Sequence[Tensor]) -> None:
        self.tensors = ()
        if pieces := self._runs.next(runs[0].numel()):
            for run, piece in zip(runs, zip(*(x.unbind() for x in pieces), strict=True), strict=True):
                torch.cat(piece, out=run)

    def whole(self) -> Tensor:
        tensors, self.tensors = self.tensors, ()
        self._runs = ConcatReader(())
        return packed(tensors, self.parts, self._dims)


Operand = Tensor | LazyBucket  # of a collective


def _runs_of(tensors: deque[Tensor], parts: int, dims: Sequence[int]) -> Iterator[Tensor]:
    """Yield each tensor's chunks of all runs. A yielded tensor is no longer referenced here."""
    for dim in dims:
        yield run_of(tensors.popleft(), parts, dim)


def to_tensor(x: Operand) -> Tensor:
    return x.whole() if isinstance(x, LazyBucket) else x
