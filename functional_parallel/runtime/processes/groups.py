"""Process groups of a mesh: one per set of ranks that differ only along some axes, all created together."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain, combinations
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from sharding_specs import Mesh

from ..calls import CallLog, GroupWaits, ProcessGroupRef, rank_name
from ..watch import recorded
from .torch_messages import ROLL_CALL, TAG_BITS, TaggedMessages

_MOST_AXES_TOGETHER = 3
Axes = tuple[str, ...]
Value = TypeVar("Value")


class AxisGroup:
    """The ranks of one collective, numbered in the order of the axes, the first axis major."""

    def __init__(self, handle: ProcessGroupRef, rank: int, ranks: tuple[int, ...], waits: GroupWaits) -> None:
        self._handle, self.ranks, self.waits = handle, ranks, waits
        self.rank, self.size = ranks.index(rank), len(ranks)
        self.seats = tuple(sorted(ranks).index(each) for each in ranks)
        self.backend = str(dist.get_backend(self.handle))
        # before bytes of one call are used for another; None if the check would take time on a device
        self.call_check: _CallCheck | None = None
        if self.backend in ("gloo", "mpi4py"):
            others = [(self.rank + step) % self.size for step in range(1, self.size)]  # not all begin with one rank
            self.call_check = _CallCheck(others, TaggedMessages(handle, self.seats, lambda: ROLL_CALL), waits)

    @property
    def handle(self) -> dist.ProcessGroup:
        return self._handle.group

    def messages(self) -> TaggedMessages:
        """Return messages to single ranks. On gloo, ranks in different calls do not receive each other's."""
        doing = self.waits.doing
        return TaggedMessages(
            self._handle, self.seats, lambda: doing.brief(TAG_BITS - 1) if self.backend == "gloo" else 0
        )

    def in_order(self, parts: Sequence[Value]) -> list[Value]:
        return [parts[seat] for seat in self.seats]

    def by_seat(self, parts: Sequence[Tensor]) -> list[Tensor]:
        placed = dict(zip(self.seats, parts, strict=True))
        return [placed[seat] for seat in range(len(parts))]


class _CallCheck:
    """Exchange of call ids with the first collective of a call: bytes of two calls may be equally many."""

    def __init__(self, others: Sequence[int], messages: TaggedMessages, waits: GroupWaits) -> None:
        self._others, self._messages, self._waits = others, messages, waits
        self._checked = 0  # no call yet

    def run(self) -> None:
        mark = self._waits.doing.mark
        if mark == self._checked:
            return
        mine = torch.tensor([mark], dtype=torch.int64, device="cpu")
        marks = {rank: torch.zeros(1, dtype=torch.int64, device="cpu") for rank in self._others}
        receiving = [self._messages.receive(found, rank) for rank, found in marks.items()]
        for message in [*receiving, *(self._messages.send(mine, rank) for rank in marks)]:
            message.wait()
        for rank, found in marks.items():
            if int(found) != mark:
                self._waits.doing.refuse(int(found), self._waits.name(rank))
        self._checked = mark


class MeshGroups:
    def __init__(self, mesh: Mesh, rank: int, timeout: timedelta | None, doing: CallLog) -> None:
        self._mesh, self._rank, self._timeout, self._doing = mesh, rank, timeout, doing
        self._groups = _make_groups(mesh, rank, timeout)
        self._found: dict[Axes, AxisGroup] = {}

    def over(self, axes: Axes) -> AxisGroup:
        if axes in self._found:
            return self._found[axes]
        ranks = next(tuple(ranks) for ranks in self._mesh.groups(axes) if self._rank in ranks)
        members = frozenset(ranks)
        if ranks == (self._rank,) and members not in self._groups:  # the other ranks take no part
            with recorded():
                group = dist.new_group([dist.get_rank()], timeout=self._timeout, use_local_synchronization=True)
            self._groups[members] = ProcessGroupRef(group)
        if members not in self._groups:
            raise ValueError(
                f"a collective over {axes}: process groups are made for at most {_MOST_AXES_TOGETHER} axes together, "
                "or all of them; write one collective per axis"
            )
        seconds = (self._timeout or default_pg_timeout).total_seconds()
        waits = GroupWaits(seconds, self._doing, [rank_name(self._mesh, rank) for rank in ranks])
        self._found[axes] = AxisGroup(self._groups[members], self._rank, ranks, waits)
        return self._found[axes]


def _make_groups(mesh: Mesh, rank: int, timeout: timedelta | None) -> dict[frozenset[int], ProcessGroupRef]:
    names = [name for name in mesh.axis_names if mesh.axis_size(name) > 1]
    few = chain.from_iterable(combinations(names, number) for number in range(1, _MOST_AXES_TOGETHER + 1))
    made: dict[frozenset[int], dist.ProcessGroup] = {}
    for axes in dict.fromkeys([*few, tuple(names)]):
        for ranks in mesh.groups(axes) if axes else ():
            if frozenset(ranks) not in made and (rank in ranks or not mesh.is_partial):
                members = [mesh.processes[each] for each in sorted(ranks)]
                with recorded():
                    made[frozenset(ranks)] = dist.new_group(
                        members, timeout=timeout, use_local_synchronization=mesh.is_partial
                    )
    return {ranks: ProcessGroupRef(group) for ranks, group in made.items() if rank in ranks}
