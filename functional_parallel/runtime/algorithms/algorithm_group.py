"""The ranks that one collective goes over, and the ways in which they reach each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..calls import CallLog, CollectiveSteps, ProcessGroupRef, RunningCollective, Waitable
from ..shared_memory import LARGEST, Channels, connect, host_identity

__all__ = ["COMPLETED", "ROLL_CALL", "AlgorithmGroup", "RankGroup", "TaggedMessages"]

_TAG_BITS = 31
_COUNT_BITS = 12  # so many collectives of a group are never under way at once
_SINGLE = 0  # in the place of the count, of messages that belong to no collective
ROLL_CALL = (1 << _TAG_BITS) - 1  # a tag that no other messages have


class RankGroup:
    """Some ranks, numbered from 0, of which this is one."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def others(self) -> list[int]:
        """All ranks but this one, beginning with the next, so that not all send to one at once."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]


class AlgorithmGroup(RankGroup):
    """A process group, its ranks numbered in the order of the mesh axes.

    Args:
        handle: torch's process group.
        rank: this rank's number.
        seats: for each rank, its number in torch's group.
        timeout: seconds to wait for another rank, where torch does not do the waiting.
        host: equal on ranks that may share memory; None asks the system.
        tags: shared by all teams on one process group, so that no two of their collectives have the same tag.
        doing: what this rank is doing.
        names: the ranks' names, for messages.

    Attributes:
        hosts: the ranks on each host.
        on_my_host: those on this one's.
        is_on_one_host: whether there is no other.
        has_hosts_alike: whether every host has as many ranks.
        shared: the memory that it shares with the ranks of its host, if it can.
    """

    def __init__(
        self,
        handle: Any,
        rank: int,
        seats: Sequence[int],
        timeout: float = 600.0,
        host: str | None = None,
        tags: Iterator[int] | None = None,
        doing: CallLog | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__(rank, len(seats))
        called = names or [f"rank {number} of the group" for number in range(len(seats))]
        self._handle, self._seats = ProcessGroupRef(handle), seats
        self._tags, self._doing = tags or count(), doing or CallLog()
        names = self.exchange(host_identity() if host is None else host)
        by_name: dict[str, list[int]] = {}
        for number, name in enumerate(names):
            by_name.setdefault(name, []).append(number)
        self.hosts = list(by_name.values())
        self.on_my_host = next(ranks for ranks in self.hosts if rank in ranks)
        self.is_on_one_host = len(self.hosts) == 1
        self.has_hosts_alike = len({len(ranks) for ranks in self.hosts}) == 1
        here = [called[number] for number in self.on_my_host]
        self.shared = connect(rank, self.on_my_host, self.exchange, timeout, self._doing, here)

    @property
    def handle(self) -> Any:
        """Torch's process group, as long as torch holds it."""
        return self._handle.group

    def run(self, steps: CollectiveSteps) -> RunningCollective:
        """Start an algorithm."""
        return RunningCollective(steps) if self.shared is None else self.shared.run(steps)

    def messages(self) -> TaggedMessages:
        """The messages of one collective: all ranks call this in the same order."""
        return self._tagged(1 + next(self._tags) % ((1 << _COUNT_BITS) - 2))

    def _tagged(self, number: int) -> TaggedMessages:
        """Messages that no rank takes for its own which does something else."""
        doing = self._doing.brief(_TAG_BITS - _COUNT_BITS)
        return TaggedMessages(self._handle, self._seats, doing << _COUNT_BITS | number)

    # --- messages to single ranks, received in the order in which they were sent ---

    def send(self, x: Tensor, to: int) -> Waitable:
        """Start to send contiguous bytes, which must not change until this is waited for."""
        channels = self._channels(x, to)
        if channels is None:
            return self._tagged(_SINGLE).send(x, to)
        channels.send(x, self.on_my_host.index(to))
        return COMPLETED

    def receive(self, into: Tensor, source: int) -> Waitable:
        """Start to receive into contiguous bytes."""
        channels = self._channels(into, source)
        if channels is None:
            return self._tagged(_SINGLE).receive(into, source)
        return channels.receive(into, self.on_my_host.index(source))

    def _channels(self, x: Tensor, other: int) -> Channels | None:
        """The ways through memory, where they serve: both ends must answer alike. What is empty goes no way."""
        if self.shared is None or other not in self.on_my_host or not 0 < x.numel() <= LARGEST:
            return None
        return self.shared.channels

    # --- two levels, where every host has as many ranks ---

    def places(self) -> list[tuple[int, ...]]:
        """For each place on a host, the ranks there, one of each host."""
        return list(zip(*self.hosts, strict=True))

    @property
    def with_my_place(self) -> tuple[int, ...]:
        return self.places()[self.local.rank]

    @property
    def local(self) -> RankGroup:
        """The ranks on this host."""
        return RankGroup(self.on_my_host.index(self.rank), len(self.on_my_host))

    @property
    def across(self) -> RankGroup:
        """The ranks that have this one's place on their hosts."""
        return RankGroup(self.with_my_place.index(self.rank), len(self.hosts))

    def exchange(self, value: Any) -> list[Any]:
        """One object from each rank, by rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.handle)
        return [values[seat] for seat in self._seats]


class TaggedMessages:
    """Sends and receives under a tag of their own, so that no other collective's can be taken for them.

    Between two ranks, messages of one tag arrive in the order in which they were sent.
    """

    __slots__ = ("_handle", "_seats", "_tag")

    def __init__(self, handle: ProcessGroupRef, seats: Sequence[int], tag: int = 0) -> None:
        self._handle, self._seats, self._tag = handle, seats, tag

    def among(self, ranks: Sequence[int]) -> TaggedMessages:
        """The same between some of the ranks, numbered by their place in the list."""
        return TaggedMessages(self._handle, [self._seats[rank] for rank in ranks], self._tag)

    def send(self, x: Tensor, to: int) -> Waitable:
        """Start to send a contiguous tensor, which must not change until this is waited for."""
        return self._started(dist.isend, x, self._seats[to], "group_dst")

    def receive(self, into: Tensor, source: int) -> Waitable:
        """Start to receive into a contiguous tensor."""
        return self._started(dist.irecv, into, self._seats[source], "group_src")

    def _started(self, operation: Callable[..., Any], x: Tensor, seat: int, end: str) -> Waitable:
        if x.numel() == 0:
            return COMPLETED
        work = operation(x, group=self._handle.group, tag=self._tag, **{end: seat})
        return _UnderWay(work, self._handle, seat, "to" if end == "group_dst" else "from")


class _UnderWay:
    """A message to or from another rank, which an error names: torch names an address."""

    __slots__ = ("_direction", "_handle", "_seat", "_work")

    def __init__(self, work: Any, handle: ProcessGroupRef, seat: int, direction: str) -> None:
        self._work, self._handle, self._seat, self._direction = work, handle, seat, direction

    def wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            rank = dist.get_global_rank(self._handle.group, self._seat)
            raise RuntimeError(f"a message {self._direction} rank {rank} did not arrive: {error}") from error

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class _Nothing:
    def wait(self) -> None:
        pass


COMPLETED = _Nothing()
