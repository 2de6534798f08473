"""Which samples each rank reads: a pure function of length, seed, epoch and place on the mesh.

An epoch is a permutation of the samples, cut into global batches, each cut into one block per rank along the batch's
axes: block r of global batch k is what rank r would take from that batch if it were given whole. So a run fed by
`train_step(batch="own")` sees what one fed by whole batches sees, and a run resumed on another number of ranks goes on
with the same batches.

Without a rank, a sampler returns the samples of this process. In a simulated run that is the global batch, since one
process has all ranks. A script that names no rank is therefore right in both.
"""

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

__all__ = ["Position", "Sampler"]

_TAILS = ("uneven", "drop", "repeat")


class Position(NamedTuple):
    """How far a run has read its samples. A saved position continues the run, on any mesh.

    >>> import functional_parallel as fp
    >>> from sharding_specs import Mesh
    >>> sampler = fp.Sampler(6, batch=2, mesh=Mesh(data=2), shuffle=False)
    >>> next(sampler.run(start=fp.Position(epoch=4, batch=1)))
    (Position(epoch=4, batch=2), [2, 3])

    Args:
        epoch: the epoch, counted from 0.
        batch: the number of global batches already read in that epoch.
    """

    epoch: int = 0
    batch: int = 0


START = Position()
torch.serialization.add_safe_globals([Position])  # torch.load(weights_only=True), its default, may make one


@dataclass(frozen=True)
class Sampler:
    """A sharded data sampler: it covers every sample of an epoch once.

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
        length: the number of samples.
        batch: samples in a global batch, all ranks together.
        mesh: the mesh.
        axis: the axis or axes that split the batch, first one major; ranks that differ along others read the same.
        tail: what becomes of the last batch of an epoch when it is not full. "uneven": its samples are split as evenly
            as they can be, the first ranks having one more and the last perhaps none (`even_batches` fills up); "drop":
            they are left out (each epoch shuffles anew, so each leaves out others); "repeat": it is filled from the
            beginning of the epoch's order.
        shuffle: whether each epoch has an order of its own, made from seed and epoch; otherwise 0, 1, 2, ….
        seed: of the orders.

    Raises:
        ValueError: for a batch that the ranks along the axes do not divide, an unknown tail, or no sample at all.
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
        """How many ranks the batch is split over."""
        return self.mesh.axis_size(self.axis)

    @property
    def rows(self) -> int:
        """Number of samples that this process reads of a full batch; `even_batches` pads the last one to it.

        In a simulated run it is the global batch.
        """
        return self.batch if self._here() is None else self.batch // self.ranks

    @property
    def batches(self) -> int:
        """Global batches in an epoch, the same on every rank."""
        return self.length // self.batch if self.tail == "drop" else math.ceil(self.length / self.batch)

    def order(self, epoch: int) -> torch.Tensor:
        """The order in which an epoch reads the samples.

        Args:
            epoch: counts from 0.

        Returns:
            A permutation of 0 … length - 1, the same on every rank and every machine.
        """
        numbers = torch.arange(self.length)
        if not self.shuffle:
            return numbers
        # fold_in is one to one in the number it folds, so no two samples draw the same and the order is unique.
        return random.fold_in(random.fold_in(random.key(self.seed), epoch), numbers).argsort()

    def epoch(self, epoch: int, rank: int | None = None) -> list[list[int]]:
        """Return the batches that a rank, or this process, reads in an epoch.

        Args:
            epoch: counts from 0.
            rank: a rank of the mesh. By default the batches are those of this process: of its rank, or global batches
                where it simulates all ranks.

        Returns:
            Per global batch, the samples of the rank's block, or all of them.
        """
        order, rank = self.order(epoch), self._here() if rank is None else rank
        return [self._block(order, number, rank) for number in range(self.batches)]

    def run(self, rank: int | None = None, start: Position = START) -> Iterator[tuple[Position, list[int]]]:
        """Return the batches of a rank, or of this process, from a position on, over epochs without end.

        >>> import itertools
        >>> from sharding_specs import Mesh
        >>> sampler = Sampler(4, batch=2, mesh=Mesh(data=2), shuffle=False)
        >>> for position, samples in itertools.islice(sampler.run(rank=1, start=Position(0, 1)), 2):
        ...     print(position, samples)
        Position(epoch=1, batch=0) [3]
        Position(epoch=1, batch=1) [1]

        Args:
            rank: a rank of the mesh; by default this process, as in `epoch`.
            start: where to begin; the beginning by default.

        Returns:
            Pairs of the position after a batch, which a checkpoint keeps (it is two numbers), and the batch's samples.

        Raises:
            ValueError: for a position that no epoch of this sampler has, as of one with smaller batches.
        """
        return self._run(self._here() if rank is None else rank, self._checked(start))

    def _checked(self, start: Position) -> Position:
        epoch, batch = start
        if epoch < 0 or not 0 <= batch < self.batches:
            raise ValueError(
                f"Sampler.run(start={Position(epoch, batch)}): an epoch of {self.length} samples in batches of "
                f"{self.batch} has batches 0 to {self.batches - 1}; a run goes on with the length and the batch that "
                "it began with, on any mesh"
            )
        return Position(epoch, batch)

    def _here(self) -> int | None:
        """Return the rank of this process on the mesh; None where it simulates all ranks."""
        runtime = default_runtime(self.mesh)
        return runtime.rank if isinstance(runtime, ProcessRuntime) else None

    def _run(self, rank: int | None, start: Position) -> Iterator[tuple[Position, list[int]]]:
        epoch, batch = start
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
