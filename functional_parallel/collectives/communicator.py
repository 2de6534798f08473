"""The small interface between a collective and whatever moves the bytes.

A carrier is bound to mesh axes by `axes.bind`. It computes one rank's result of each primitive, on plain tensors below
autograd, over axes of which at least one is larger than one. Real processes (`runtime.processes.process_carrier`) and
vmap levels (`vmap`) are carriers; `group` says what each of the results must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

__all__ = ["Communicator", "Lane"]


@runtime_checkable
class Communicator(Protocol):
    """What a set of ranks must be able to do. Axes come as a tuple, the first one major; dims are not negative."""

    def psum(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """The sum over the ranks."""

    def psum_scatter(self, x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
        """This rank's chunk of `dim` of the sum over the ranks."""

    def all_gather(self, x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
        """All ranks' values, concatenated along `dim`."""

    def all_to_all(self, x: Tensor, axes: tuple[str, ...], split_dim: int, concat_dim: int) -> Tensor:
        """This rank's chunk of every rank's value, concatenated along `concat_dim`."""

    def ppermute(self, x: Tensor, axes: tuple[str, ...], pairs: Sequence[int]) -> Tensor:
        """The value of the rank that sends here (pairs are source, target, source, target, ...), or zeros."""

    def pmax(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """The elementwise largest of all ranks' values."""

    def pmin(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """The elementwise smallest of all ranks' values."""

    def pbroadcast(self, x: Tensor, axes: tuple[str, ...], source: int) -> Tensor:
        """The value of rank `source`."""

    def axis_index(self, axes: tuple[str, ...]) -> int:
        """This rank's index along the axes."""


class Lane:
    """The carrier of an axis that is a vmap level. The primitives' vmap rules do its work.

    Args:
        name: the axis.
        index: each entry's index, an integer tensor mapped over the level and over nothing else.
    """

    def __init__(self, name: str, index: Tensor) -> None:
        self.name = name
        self.index = index

    def __repr__(self) -> str:
        return f"Lane({self.name!r})"
