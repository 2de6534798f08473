"""Messages between single ranks of a process group, by torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from ..calls import ProcessGroupRef, Waitable

TAG_BITS = 31
ROLL_CALL = (1 << TAG_BITS) - 1  # a tag that no other messages have


class Messages(Protocol):
    """Messages to single ranks of a group. Between two ranks, they arrive in the order of sending."""

    def send(self, x: Tensor, to: int) -> Waitable:
        """Start to send contiguous bytes. They must not change until the returned handle is waited for."""

    def receive(self, into: Tensor, source: int) -> Waitable:
        """Start to receive into contiguous bytes."""


class TaggedMessages:
    """Messages under a tag, so that messages of other calls are not received instead."""

    __slots__ = ("_handle", "_seats", "_tag")

    def __init__(self, handle: ProcessGroupRef, seats: Sequence[int], tag: Callable[[], int]) -> None:
        self._handle, self._seats, self._tag = handle, seats, tag

    def send(self, x: Tensor, to: int) -> Waitable:
        return self._started(dist.isend, x, self._seats[to], "group_dst")

    def receive(self, into: Tensor, source: int) -> Waitable:
        return self._started(dist.irecv, into, self._seats[source], "group_src")

    def _started(self, operation: Callable[..., dist.Work | None], x: Tensor, seat: int, end: str) -> Waitable:
        if x.numel() == 0:
            return COMPLETED
        is_staged = x.device.type != "cpu" and str(dist.get_backend(self._handle.group)) == "gloo"
        carried = x.cpu() if is_staged else x  # gloo's messages lie in main memory
        work = operation(carried, group=self._handle.group, tag=self._tag(), **{end: seat})
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


class _Completed:
    def wait(self) -> None:
        pass


COMPLETED = _Completed()
