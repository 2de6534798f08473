"""Ranks of a collective by host, and the memory that the ranks of one host share."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..runtime import COMPLETED, AxisGroup, Waitable, host_identity
from .channels import Channels
from .rendezvous import connect
from .slots import LARGEST


class HostGroup:
    def __init__(self, group: AxisGroup, host: str | None = None) -> None:
        self._messages, self.rank, self.size = group.messages(), group.rank, group.size

        def exchange(value: Any) -> list[Any]:
            values = [value] * group.size
            dist.all_gather_object(values, value, group=group.handle)
            return group.in_order(values)

        hosts = exchange(host_identity() if host is None else host)
        self.hosts = len(set(hosts))
        self.on_my_host = [rank for rank, name in enumerate(hosts) if name == hosts[group.rank]]
        self.memory = connect(group.rank, self.on_my_host, exchange, group.waits)

    @property
    def shares_all(self) -> bool:
        return self.memory is not None and self.hosts == 1

    # --- messages to single ranks, received in the order of sending ---

    def send(self, x: Tensor, to: int) -> Waitable:
        channels = self._channels(x, to)
        if channels is None:
            return self._messages.send(x, to)
        channels.send(x, self.on_my_host.index(to))
        return COMPLETED

    def receive(self, into: Tensor, source: int) -> Waitable:
        channels = self._channels(into, source)
        if channels is None:
            return self._messages.receive(into, source)
        return channels.receive(into, self.on_my_host.index(source))

    def _channels(self, x: Tensor, other: int) -> Channels | None:
        """Return the channels if they can carry `x`. Both ends must decide the same way."""
        if self.memory is None or other not in self.on_my_host or not 0 < x.numel() <= LARGEST:
            return None
        return self.memory.channels
