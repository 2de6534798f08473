"""Messages between the ranks of some axes in different processes: nonblocking sends and receives."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...ir import Aval
from ...schedules import Action, Receive, Send
from ..calls import NamedWait, Waitable, rank_name
from ..joined import as_bytes
from .process_communicator import ProcessCommunicator
from .torch_messages import COMPLETED

_KINDS = (RuntimeError, ValueError)  # errors of torch's messages


class PointToPoint:
    def __init__(self, communicator: ProcessCommunicator, axes: Sequence[str], rank: int, device: torch.device) -> None:
        self.communicator, self.axes, self.rank, self.device = communicator, tuple(axes), rank, device
        self._messages = communicator.messages(self.axes, device)
        self._expected: dict[Action, tuple[Receive, list[torch.Tensor], list[Waitable], float]] = {}
        self._sent: list[tuple[Any, torch.Tensor, Send | int]] = []

    def send(self, step: Send, values: Sequence[torch.Tensor]) -> None:
        self._sent = [entry for entry in self._sent if not entry[0].is_completed()]
        self._post_each(values, step.rank, step)

    def expect(self, step: Receive, avals: Sequence[Aval]) -> None:
        buffers, works = self._receives(avals, step.rank)
        self._expected[step.action] = step, buffers, works, time.monotonic()

    def take(self, action: Action) -> list[torch.Tensor] | None:
        if action not in self._expected:
            return None
        step, buffers, works, began = self._expected.pop(action)
        for work in works:
            self._wait(work, step, began)
        return buffers

    def finish(self) -> None:
        for work, _, name in self._sent:
            self._wait(work, name, time.monotonic())
        self._sent.clear()

    def exchange(
        self, outgoing: Mapping[int, Sequence[torch.Tensor]], incoming: Mapping[int, Sequence[Aval]]
    ) -> dict[int, list[torch.Tensor]]:
        """Exchange values with ranks. In each pair the lower rank sends first, so that no cycle of waits forms."""
        began = time.monotonic()
        under_way = []
        for rank in sorted(outgoing.keys() | incoming.keys()):
            if self.rank < rank:
                self._post_each(_joined(outgoing.get(rank, ())), rank, rank)
            if avals := incoming.get(rank, ()):
                buffers, works = self._receives([Aval((size,), dtype) for dtype, size in _sizes(avals)], rank)
                under_way.append((rank, avals, buffers, works))
            if self.rank > rank:
                self._post_each(_joined(outgoing.get(rank, ())), rank, rank)
        found = {}
        for rank, avals, buffers, works in under_way:
            for work in works:
                self._wait(work, rank, began)
            found[rank] = _apart(buffers, avals)
        self.finish()
        return found

    # --- one tensor ---

    def _receives(self, avals: Sequence[Aval], rank: int) -> tuple[list[torch.Tensor], list[Waitable]]:
        buffers = [torch.empty(aval.shape, dtype=aval.dtype, device=self.device) for aval in avals]
        return buffers, [self._messages.receive(as_bytes(buffer), rank) for buffer in buffers]

    def _post_each(self, values: Sequence[torch.Tensor], rank: int, name: Send | int) -> None:
        for value in values:
            buffer = as_bytes(value)
            with _wait_for(self.communicator, self.axes, name).noted(kinds=_KINDS):  # for free space
                work = self._messages.send(buffer, rank)
            if work is not COMPLETED:
                self._sent.append((work, buffer, name))

    def _wait(self, work: Waitable, name: Send | Receive | int, began: float) -> None:
        with _wait_for(self.communicator, self.axes, name).noted(began, kinds=_KINDS):
            work.wait()


def _wait_for(communicator: ProcessCommunicator, axes: Sequence[str], name: Send | Receive | int) -> NamedWait:
    group = next(group for group in communicator.mesh.groups(axes) if communicator.rank in group)
    other = group[name if isinstance(name, int) else name.rank]

    def what() -> str:
        peer = rank_name(communicator.mesh, other)
        if isinstance(name, int):
            return f"exchange with {peer}"
        verb, preposition = ("send", "to") if isinstance(name, Send) else ("receive", "from")
        return f"{verb} {name.action} {preposition} {peer}"

    return NamedWait(communicator.mesh, communicator.rank, [other], what)


def _sizes(avals: Sequence[Aval]) -> list[tuple[torch.dtype, int]]:
    sizes = Counter[torch.dtype]()
    for aval in avals:
        sizes[aval.dtype] += aval.numel
    return list(sizes.items())


def _joined(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for value in values:
        by_dtype.setdefault(value.dtype, []).append(value.reshape(-1))
    return [torch.cat(parts) for parts in by_dtype.values()]


def _apart(buffers: Sequence[torch.Tensor], avals: Sequence[Aval]) -> list[torch.Tensor]:
    rest = {buffer.dtype: buffer for buffer in buffers}
    found = []
    for aval in avals:
        buffer = rest[aval.dtype]
        found.append(buffer[: aval.numel].reshape(aval.shape))
        rest[aval.dtype] = buffer[aval.numel :]
    return found
