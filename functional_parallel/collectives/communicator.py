"""Interface between a collective and the communicator that moves the bytes.

It computes one rank's result of each primitive, on plain tensors below autograd. `reference` defines the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Communicator(Protocol):
    """Operations that a set of ranks must support. Axes are a tuple, the first one major. Dims are not negative."""

    def psum(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Return the sum over the ranks."""

    def psum_scatter(self, x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
        """Return this rank's chunk, along `dim`, of the sum over the ranks."""

    def all_gather(self, x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
        """Concatenate the values of all ranks along `dim`."""

    def all_to_all(self, x: Tensor, axes: tuple[str, ...], split_dim: int, concat_dim: int) -> Tensor:
        """Concatenate this rank's chunk of every rank's value along `concat_dim`."""

    def ppermute(self, x: Tensor, axes: tuple[str, ...], pairs: Sequence[int]) -> Tensor:
        """Return the value of the rank that sends to this rank, or zeros. `pairs` is flat: source, target, source, …"""

    def pmax(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Return the elementwise maximum over the ranks."""

    def pmin(self, x: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Return the elementwise minimum over the ranks."""

    def pbroadcast(self, x: Tensor, axes: tuple[str, ...], source: int) -> Tensor:
        """Return the value of rank `source`."""

    def broadcast(self, x: Tensor, axes: tuple[str, ...], owner: int) -> Tensor:
        """Return the value of the owner. On other ranks, `x` has its shape and no memory, here and in `scatter`."""

    def scatter(self, x: Tensor, axes: tuple[str, ...], dim: int, owner: int) -> Tensor:
        """Return this rank's chunk, along `dim`, of the value of the owner."""

    def gather(self, x: Tensor, axes: tuple[str, ...], dim: int, owner: int) -> Tensor:
        """Concatenate the values of all ranks along `dim`, on the owner. Other ranks get a tensor without memory."""

    def reduce(self, x: Tensor, axes: tuple[str, ...], owner: int) -> Tensor:
        """Return the sum over the ranks, in rank order, on the owner. Other ranks get a tensor without memory."""

    def axis_index(self, axes: tuple[str, ...]) -> int:
        """Return the index of this rank along the axes."""


@dataclass(frozen=True, eq=False)
class Lane:
    """Binding of an axis to a vmap level. The vmap rules of the primitives do its work."""

    name: str
    index: Tensor = field(repr=False)  # index of each entry, mapped over this level only
