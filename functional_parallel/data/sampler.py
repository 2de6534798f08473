"""Sharded sampler: the samples of a rank are a pure function of length, seed, epoch and position on the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sharding_specs import Mesh

from .. import random
from ..collectives import Axes
from ..runtime import ProcessRuntime, default_runtime

_TAILS = ("uneven", "drop", "repeat")


class Position(NamedTuple):
    """Position of a run in its samples. A run can be resumed from a saved position, on any mesh.

    >>> import functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> sampler = fp.Sampler(6, batch=2, mesh=Mesh(data=2), shuffle=False)
    >>> next(sampler.run(start=fp.Position(epoch=4, batch=1)))
    (Position(epoch=4, batch=2), [2, 3])

    Args:
        epoch: the epoch, counted from 0.
        batch: number of global batches already read in that epoch.
    """

    epoch: int = 0
    batch: int = 0


START = Position()
torch.serialization.add_safe_globals([Position])  # allow it in torch.load(weights_only=True), the default


@dataclass(frozen=True)
class Sampler:
    """A sharded data sampler. An epoch reads every sample once, except as `tail` specifies.

    >>> import functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> sampler = fp.Sampler(10, batch=4, mesh=Mesh(data=2, tensor=2), shuffle=False)
    >>> sampler.epoch(0)                      # of this process: here it simulates all ranks
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    >>> sampler.epoch(0, rank=0)
    [[0, 1], [4, 5], [8]]
    >>> sampler.epoch(0, rank=3)
    [[2, 3], [6, 7], [9]]

    Use it as `torch.utils.data.DataLoader(dataset, batch_sampler=sampler.epoch(epoch))` with
    `fp.train_step(..., batch="own")`. The same script then trains on the same batches simulated and under torchrun.

    Args:
        length: number of samples.
        batch: number of samples in a global batch, over all ranks.
        mesh: the mesh.
        axis: the axis or axes that split the batch, with the first one major. Ranks that differ only along other axes
            read the same samples.
        tail: rule for the last batch of an epoch if it is incomplete. "uneven": its samples are split as evenly as
            possible. The first ranks may have one sample more, and the last ranks may have none (`even_batches` pads
            them). "drop": its samples are dropped; if `shuffle` is set, each epoch drops other samples. "repeat": it is
            completed from the beginning of the order of the epoch.
        shuffle: whether each epoch has its own order, computed from seed and epoch. If False, the order is 0, 1, 2, ….
        seed: seed of the orders.

    Raises:
        ValueError: if the number of ranks along the axes does not divide `batch`, `tail` is unknown, `length` is less
            than 1, or "drop" leaves no batch.
    """

    length: int
    batch: int
    mesh: Mesh
    axis: Axes = "data"
    tail: str = "uneven"
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tail not in _TAILS:
            raise ValueError(f"Sampler(tail={self.tail!r}): it is one of {', '.join(map(repr, _TAILS))}")
        if self.length < 1:
            raise ValueError(f"Sampler(length={self.length}): there must be a sample")
        ranks = self.ranks
        if self.batch < 1 or self.batch % ranks:
            below, above = self.batch // ranks * ranks, (self.batch // ranks + 1) * ranks
            raise ValueError(
                f"Sampler(batch={self.batch}): the {ranks} ranks along {self.axis!r} do not divide a global batch of "
                f"{self.batch}; take {' or '.join(str(size) for size in (below, above) if size > 0)}"
            )
        if not self.batches:
            raise ValueError(
                f"Sampler(tail='drop'): {self.length} samples do not fill one batch of {self.batch}, so nothing is left"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks that the batch is split over."""
        return self.mesh.axis_size(self.axis)

    @property
    def rows(self) -> int:
        """Number of samples of a full batch that this process reads; `even_batches` pads the last batch to it.

        In a simulated run it is the size of the global batch.
        """
        return self.batch if self._here() is None else self.batch // self.ranks

    @property
    def batches(self) -> int:
        """Number of global batches per epoch, the same on every rank."""
        return self.length // self.batch if self.tail == "drop" else math.ceil(self.length / self.batch)

    def order(self, epoch: int) -> torch.Tensor:
        """Return the order of the samples in an epoch.

        Args:
            epoch: the epoch, counted from 0.

        Returns:
            A permutation of 0 … length - 1, the same on every rank and every machine.
        """
        numbers = torch.arange(self.length, device="cpu")
        if not self.shuffle:
            return numbers
        # fold_in is injective in the folded number, so all samples draw different values and the order is unique.
        return random.fold_in(random.fold_in(random.key(self.seed), epoch), numbers).argsort()

    def epoch(self, epoch: int, rank: int | None = None) -> list[list[int]]:
        """Return the batches that a rank, or this process, reads in an epoch.

        Args:
            epoch: the epoch, counted from 0.
            rank: a rank of the mesh. By default the batches are for this process: for its rank, or global batches if
                it simulates all ranks.

        Returns:
            For each global batch, the samples in the block of the rank, or all samples.
        """
        order, rank = self.order(epoch), self._here() if rank is None else rank
        return [self._block(order, number, rank) for number in range(self.batches)]

    def run(self, rank: int | None = None, start: Position = START) -> Iterator[tuple[Position, list[int]]]:
        """Return an infinite iterator over the batches of a rank, or of this process, from a position on.

        >>> import itertools
        >>> from sharding_specs import Mesh
        >>> sampler = Sampler(4, batch=2, mesh=Mesh(data=2), shuffle=False)
        >>> for position, samples in itertools.islice(sampler.run(rank=1, start=Position(0, 1)), 2):
        ...     print(position, samples)
        Position(epoch=1, batch=0) [3]
        Position(epoch=1, batch=1) [1]

        Args:
            rank: a rank of the mesh; by default this process, as in `epoch`.
            start: position of the first batch. By default the run starts at the beginning.

        Returns:
            Pairs of the position after a batch and the samples of the batch. Store the position, two integers, in a
            checkpoint.

        Raises:
            ValueError: if no epoch of this sampler has the position, for example the position of a sampler with smaller
                batches.
        """
        epoch, batch = start
        if epoch < 0 or not 0 <= batch < self.batches:
            raise ValueError(
                f"Sampler.run(start={Position(epoch, batch)}): an epoch of {self.length} samples in batches of "
                f"{self.batch} has batches 0 to {self.batches - 1}. Resume with the length and batch size of the run"
            )
        return self._run(self._here() if rank is None else rank, epoch, batch)

    def _here(self) -> int | None:
        runtime = default_runtime(self.mesh)
        return runtime.rank if isinstance(runtime, ProcessRuntime) else None

    def _run(self, rank: int | None, epoch: int, batch: int) -> Iterator[tuple[Position, list[int]]]:
        while True:
            order = self.order(epoch)
            for number in range(batch, self.batches):
                last = number + 1 == self.batches
                after = Position(epoch + 1, 0) if last else Position(epoch, number + 1)
                yield after, self._block(order, number, rank)
            epoch, batch = epoch + 1, 0

    def _block(self, order: torch.Tensor, number: int, rank: int | None) -> list[int]:
        places = range(number * self.batch, (number + 1) * self.batch)
        if self.tail == "uneven":
            places = range(places.start, min(places.stop, self.length))
        ranks, index = (1, 0) if rank is None else (self.ranks, self.mesh.axis_index(rank, self.axis))
        size, more = divmod(len(places), ranks)
        begin = index * size + min(index, more)
        mine = [place % self.length for place in places[begin : begin + size + (index < more)]]
        return order[mine].tolist()
