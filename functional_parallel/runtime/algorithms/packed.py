"""Several tensors that travel as one: an algorithm that copies what it sends packs them where it sends from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...program.packing import packed, runs_of

__all__ = ["Packed", "whole"]


class Packed:
    """What `fp.pack` would make of tensors, before any of them is copied. They are let go of when they are packed.

    >>> Packed([torch.tensor([[1, 2], [3, 4]]), torch.tensor([5, 6])], 2, [1, 0]).whole()
    tensor([1, 3, 5, 2, 4, 6])

    Args:
        tensors: at least one, of one dtype, on one device.
        parts: how many equal runs it is made of, one per rank.
        dims: per tensor, along which dim it is cut in parts.

    Attributes:
        parts, shape, dtype, device, nbytes: of the whole, which is flat.
    """

    __slots__ = ("_dims", "_tensors", "device", "dtype", "nbytes", "parts", "shape")

    def __init__(self, tensors: Sequence[Tensor], parts: int, dims: Sequence[int]) -> None:
        self._tensors, self.parts, self._dims = tensors, parts, dims
        self.dtype, self.device = tensors[0].dtype, tensors[0].device
        self.shape = torch.Size([sum(x.numel() for x in tensors)])
        self.nbytes = self.shape.numel() * self.dtype.itemsize

    def empty(self, length: int | None = None) -> Tensor:
        """Flat memory, for the whole or for so many elements."""
        return torch.empty(self.shape if length is None else length, dtype=self.dtype, device=self.device)

    def write(self, runs: Sequence[Tensor]) -> None:
        """Pack into flat memory, one stretch for each run."""
        pieces = zip(*(x.unbind() for x in runs_of(self._tensors, self.parts, self._dims)), strict=True)
        for run, piece in zip(runs, pieces, strict=True):
            torch.cat(piece, out=run)
        self._tensors = ()

    def whole(self) -> Tensor:
        """Pack into memory of their own."""
        tensors, self._tensors = self._tensors, ()
        return packed(tensors, self.parts, self._dims)


def whole(x: Tensor | Packed) -> Tensor:
    """As a tensor."""
    return x.whole() if isinstance(x, Packed) else x
