"""Communicator of a mesh on gloo. Its collectives use memory that the ranks of a host share."""

from __future__ import annotations

from typing import Any

import torch

from ..collectives import CollectiveCall
from ..runtime import ALGORITHM_VARIABLE, Axes, Messages, NamedWait, PendingCollective, ProcessCommunicator
from .host_group import HostGroup
from .packed import Operand, to_tensor
from .start_collective import START, on_result
from .unpacked import BucketLayout


class SharedMemoryCommunicator(ProcessCommunicator):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._host_groups: dict[Axes, HostGroup] = {}

    def start(
        self,
        call: CollectiveCall,
        x: Operand,
        *,
        overwrite: bool = False,
        where: str = "",
        operation: str = "",
        layout: BucketLayout | None = None,
    ) -> PendingCollective:
        """Start a primitive on a tensor or a bucket. With a layout, the result has the tensors in the full result."""
        group = self._host_group(call.axes, where) if x.device.type == "cpu" else None
        if group is None or not group.shares_all:
            started = super().start(call, to_tensor(x), overwrite=overwrite, where=where, operation=operation)
            return on_result(started, layout)
        memory, wait = group.memory, self._wait(operation or call.kind, x, call.axes, where)
        assert memory is not None
        steps, finish = START[call.kind](memory, x, **call.routing, overwrite=overwrite, layout=layout)
        return PendingCollective(lambda: memory.run(steps), finish, wait)

    def messages(self, axes: Axes, device: torch.device) -> Messages:
        group = self._host_group(axes) if device.type == "cpu" else None
        return super().messages(axes, device) if group is None else group

    def algorithms(self, axes: Axes) -> str:
        group = self._host_group(axes)
        if group is None:
            return super().algorithms(axes)
        hosts = f"{group.size} ranks on {group.hosts} host{'s' * (group.hosts > 1)}: "
        if group.shares_all:
            return f"{hosts}sums, gathers and exchanges over {axes} go through shared memory"
        return f"{hosts}{super().algorithms(axes)}, because these ranks do not all share memory"

    def _host_group(self, axes: Axes, where: str = "") -> HostGroup | None:
        """Return the group over some axes by host; None without gloo. The first call is a collective."""
        members = self._groups.over(axes)
        if members.backend != "gloo" or members.size == 1:
            return None
        if axes not in self._host_groups:
            what = f"the first collective over {axes}, in which its ranks find each other,"
            wait = NamedWait(self.mesh, self.rank, members.ranks, what)
            wait.where = where or self.where
            with wait.noted():
                group = HostGroup(members)
            if self.algorithm == "shared" and not group.shares_all:
                raise ValueError(
                    f"algorithm='shared' (or {ALGORITHM_VARIABLE}) cannot be used here: the ranks over {axes} do not "
                    "all share memory; write 'auto'"
                )
            self._host_groups[axes] = group
        return self._host_groups[axes]
