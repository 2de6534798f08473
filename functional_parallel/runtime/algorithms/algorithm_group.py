"""The ranks of one collective, and the communication between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from ...collectives import LARGEST
from ..calls import CollectiveSteps, GroupWaits, ProcessGroupRef, RunningCollective, Waitable
from ..shared_memory import Channels, connect, host_identity

T = TypeVar("T")

_TAG_BITS = 31
_COUNT_BITS = 12  # a group never has 2 ** 12 collectives in flight at the same time
_SINGLE = 0  # replaces the count in messages that do not belong to a collective
ROLL_CALL = (1 << _TAG_BITS) - 1  # a tag that no other messages have


class RankGroup:
    """Some ranks, numbered from 0. This process is one of them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def others(self) -> list[int]:
        """Return all other ranks, starting with the next rank, so that not all ranks first send to the same rank."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


class AlgorithmGroup(RankGroup):
    """A process group with its ranks numbered in the order of the mesh axes.

    `seats` has each rank's number in torch's group. `tags` is shared by all groups on one process group, so that their
    collectives have different tags. `host` is an id that is equal on ranks that may share memory; None queries the
    system.
    """

    def __init__(
        self,
        handle: dist.ProcessGroup,
        rank: int,
        seats: Sequence[int],
        waits: GroupWaits | None = None,
        tags: Iterator[int] | None = None,
        host: str | None = None,
    ) -> None:
        super().__init__(rank, len(seats))
        waits = waits or GroupWaits()
        self._handle, self._seats = ProcessGroupRef(handle), seats
        self._tags, self._doing = tags or count(), waits.doing
        names = self.exchange(host_identity() if host is None else host)
        by_name: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            by_name.setdefault(name, []).append(number)
        self.hosts = list(by_name.values())  # per host, its ranks
        self.on_my_host = next(ranks for ranks in self.hosts if rank in ranks)
        self.is_on_one_host = len(self.hosts) == 1
        self.shared = connect(rank, self.on_my_host, self.exchange, waits)

    def run(self, steps: CollectiveSteps) -> RunningCollective:
        return RunningCollective(steps) if self.shared is None else self.shared.run(steps)

    def messages(self) -> TaggedMessages:
        """Return the messages of one collective. All ranks must call this in the same order."""
        return self._tagged(1 + next(self._tags) % ((1 << _COUNT_BITS) - 2))

    def _tagged(self, number: int) -> TaggedMessages:
        """Return messages with a tag that ranks in a different call do not use."""
        doing = self._doing.brief(_TAG_BITS - _COUNT_BITS)
        return TaggedMessages(self._handle, self._seats, doing << _COUNT_BITS | number)

    # --- messages to single ranks, received in the order in which they were sent ---

    def send(self, x: Tensor, to: int) -> Waitable:
        """Start to send contiguous bytes. They must not change until the returned handle is waited for."""
        channels = self._channels(x, to)
        if channels is None:
            return self._tagged(_SINGLE).send(x, to)
        channels.send(x, self.on_my_host.index(to))
        return COMPLETED

    def receive(self, into: Tensor, source: int) -> Waitable:
        channels = self._channels(into, source)
        if channels is None:
            return self._tagged(_SINGLE).receive(into, source)
        return channels.receive(into, self.on_my_host.index(source))

    def _channels(self, x: Tensor, other: int) -> Channels | None:
        """Return the channels if they can carry `x`. Both ends must decide the same way. Empty tensors are not sent."""
        if self.shared is None or other not in self.on_my_host or not 0 < x.numel() <= LARGEST:
            return None
        return self.shared.channels

    # --- two levels, if every host has the same number of ranks ---

    def places(self) -> list[tuple[int, ...]]:
        """Return the ranks by their index on a host: for each index, one rank of each host."""
        return list(zip(*self.hosts, strict=True))

    @property
    def with_my_place(self) -> tuple[int, ...]:
        return self.places()[self.local.rank]

    @property
    def local(self) -> RankGroup:
        """Group of the ranks on this host."""
        return RankGroup(self.on_my_host.index(self.rank), len(self.on_my_host))

    @property
    def across(self) -> RankGroup:
        """Group of the ranks with this rank's index on their hosts."""
        return RankGroup(self.with_my_place.index(self.rank), len(self.hosts))

    def exchange(self, value: T) -> list[T]:
        """Exchange one object per rank; return them by rank."""
        values = [value] * self.size
        dist.all_gather_object(values, value, group=self._handle.group)
        return [values[seat] for seat in self._seats]


class TaggedMessages:
    """Sends and receives under a separate tag, so that messages of other collectives are not received instead.

    Between two ranks, messages of one tag arrive in the order in which they were sent.
    """

    __slots__ = ("_handle", "_seats", "_tag")

    def __init__(self, handle: ProcessGroupRef, seats: Sequence[int], tag: int = 0) -> None:
        self._handle, self._seats, self._tag = handle, seats, tag

    def among(self, ranks: Sequence[int]) -> TaggedMessages:
        """Restrict the messages to some of the ranks, renumbered by their index in `ranks`."""
        return TaggedMessages(self._handle, [self._seats[rank] for rank in ranks], self._tag)

    def send(self, x: Tensor, to: int) -> Waitable:
        """Start to send a contiguous tensor. It must not change until the returned handle is waited for."""
        return self._started(dist.isend, x, self._seats[to], "group_dst")

    def receive(self, into: Tensor, source: int) -> Waitable:
        return self._started(dist.irecv, into, self._seats[source], "group_src")

    def _started(self, operation: Callable[..., dist.Work | None], x: Tensor, seat: int, end: str) -> Waitable:
        if x.numel() == 0:
            return COMPLETED
        is_staged = x.device.type != "cpu" and str(dist.get_backend(self._handle.group)) == "gloo"
        carried = x.cpu() if is_staged else x  # gloo's messages lie in main memory
        work = operation(carried, group=self._handle.group, tag=self._tag, **{end: seat})
        assert work is not None  # this rank is in the group
        staged = (x, carried) if is_staged else None
        return _UnderWay(work, self._handle, seat, "to" if end == "group_dst" else "from", staged)


class _UnderWay:
    """A message to or from another rank. Its error names the rank; torch's names an address."""

    __slots__ = ("_direction", "_handle", "_seat", "_staged", "_work")

    def __init__(
        self, work: dist.Work, handle: ProcessGroupRef, seat: int, direction: str, staged: tuple[Tensor, Tensor] | None
    ) -> None:
        self._work, self._handle, self._seat, self._direction, self._staged = work, handle, seat, direction, staged

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            rank = dist.get_global_rank(self._handle.group, self._seat)
            raise RuntimeError(f"a message {self._direction} rank {rank} did not arrive: {error}") from error
        if self._staged is not None and self._direction == "from":
            into, carried = self._staged
            into.copy_(carried)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class _Nothing:
    def wait(self) -> None:
        pass


COMPLETED = _Nothing()
