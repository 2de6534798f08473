"""Process groups of a mesh: one per set of ranks that differ only along some axes.

Creating a group is a collective of all ranks, so all groups are created together, in one order on all ranks. If they
were created on first use, two ranks that first use them in different orders would hang.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from itertools import chain, combinations, count

import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from sharding_specs import Mesh

from ..algorithms import ROLL_CALL, AlgorithmGroup, CallCheck, RankGroup, TaggedMessages
from ..calls import CallLog, GroupWaits, ProcessGroupRef, rank_name
from ..watch import recorded

__all__ = ["Axes", "AxisGroup", "MeshGroups"]

_MOST_AXES_TOGETHER = 3
Axes = tuple[str, ...]


@dataclass(frozen=True)
class _TaggedGroup:
    """One of torch's process groups, and the tags of the library's own algorithms on it. Axes share both."""

    handle: ProcessGroupRef
    tags: Iterator[int] = field(default_factory=count)


class AxisGroup:
    """The ranks of one collective."""

    def __init__(self, group: _TaggedGroup, rank: int, ranks: tuple[int, ...], waits: GroupWaits) -> None:
        self._handle, self._tags = group.handle, group.tags
        self.ranks, self._waits = ranks, waits  # global ranks in the order of the axes, the first axis major
        self.rank = ranks.index(rank)
        self.seats = tuple(sorted(ranks).index(each) for each in ranks)  # in torch's group, by global rank
        self.backend = str(dist.get_backend(self.handle))
        # before bytes of one call are used for another; None if the check would take time on a device
        self.roll_call: CallCheck | None = None
        if self.backend in ("gloo", "mpi4py"):
            self.roll_call = CallCheck(RankGroup(self.rank, len(ranks)), self.messages(ROLL_CALL), waits)

    @property
    def handle(self) -> dist.ProcessGroup:
        """Torch's process group, for as long as torch holds it."""
        return self._handle.group

    def messages(self, tag: int = 0) -> TaggedMessages:
        return TaggedMessages(self._handle, self.seats, tag)

    def in_order(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Reorder from torch's order to the order of the axes."""
        return [parts[seat] for seat in self.seats]

    def by_seat(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Reorder from the order of the axes to torch's order."""
        placed = dict(zip(self.seats, parts, strict=True))
        return [placed[seat] for seat in range(len(parts))]

    @cached_property
    def team(self) -> AlgorithmGroup:
        """The group as needed by the library's own algorithms. The first access is a collective."""
        return AlgorithmGroup(self.handle, self.rank, self.seats, self._waits, self._tags)


class MeshGroups:
    """This rank's groups, by axes."""

    def __init__(self, mesh: Mesh, rank: int, timeout: timedelta | None, doing: CallLog) -> None:
        self._mesh, self._rank, self._timeout, self._doing = mesh, rank, timeout, doing
        self._groups = _make_groups(mesh, rank, timeout)
        self._found: dict[Axes, AxisGroup] = {}

    def over(self, axes: Axes) -> AxisGroup:
        if axes not in self._found:
            self._found[axes] = self._find(axes)
        return self._found[axes]

    def _find(self, axes: Axes) -> AxisGroup:
        ranks = next(tuple(ranks) for ranks in self._mesh.groups(axes) if self._rank in ranks)
        members = frozenset(ranks)
        if ranks == (self._rank,) and members not in self._groups:  # the other ranks take no part
            with recorded():
                group = dist.new_group([self._rank], timeout=self._timeout, use_local_synchronization=True)
            self._groups[members] = _TaggedGroup(ProcessGroupRef(group))
        if members not in self._groups:
            raise ValueError(
                f"a collective over {axes}: process groups are made for at most {_MOST_AXES_TOGETHER} axes together, "
                "or all of them; write one collective per axis"
            )
        seconds = (self._timeout or default_pg_timeout).total_seconds()
        waits = GroupWaits(seconds, self._doing, [rank_name(self._mesh, rank) for rank in ranks])
        return AxisGroup(self._groups[members], self._rank, ranks, waits)


def _make_groups(mesh: Mesh, rank: int, timeout: timedelta | None) -> dict[frozenset[int], _TaggedGroup]:
    """Return a rank's process groups by their ranks. Every rank creates every group, in the same order."""
    names = [name for name in mesh.axis_names if mesh.axis_size(name) > 1]
    few = chain.from_iterable(combinations(names, number) for number in range(1, _MOST_AXES_TOGETHER + 1))
    made: dict[frozenset[int], dist.ProcessGroup] = {}
    for axes in dict.fromkeys([*few, tuple(names)]):
        for ranks in mesh.groups(axes) if axes else ():
            if frozenset(ranks) not in made:
                with recorded():
                    made[frozenset(ranks)] = dist.new_group(sorted(ranks), timeout=timeout)
    return {ranks: _TaggedGroup(ProcessGroupRef(group)) for ranks, group in made.items() if rank in ranks}
