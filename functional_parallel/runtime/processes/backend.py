"""Collectives by a torch.distributed backend: started here, finished when they are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..calls import CallLog, CollectiveWait, PendingCollective, Waitable
from ..joined import as_bytes, cat_or_view, from_bytes
from .groups import Axes, MeshGroups

Result = TypeVar("Result")


class TorchCollectives:
    def __init__(self, groups: MeshGroups, doing: CallLog) -> None:
        self._groups, self._doing = groups, doing

    def all_reduce(self, x: Tensor, axes: Axes, overwrite: bool, wait: CollectiveWait) -> PendingCollective:
        in_place = overwrite and x.is_contiguous()
        result = x.detach() if in_place else x.detach().clone(memory_format=torch.contiguous_format)
        handle = self._groups.over(axes).handle
        return self._started(wait, axes, lambda: dist.all_reduce(result, group=handle, async_op=True), lambda: result)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int, wait: CollectiveWait) -> PendingCollective:
        members = self._groups.over(axes)
        chunks = torch.stack(members.by_seat(x.detach().chunk(members.size, dim)))
        result = torch.empty_like(chunks[0])
        return self._started(
            wait,
            axes,
            lambda: dist.reduce_scatter_tensor(result, chunks, group=members.handle, async_op=True),
            lambda: result,
        )

    def all_gather(
        self, x: Tensor, axes: Axes, finish: Callable[[list[Tensor]], Result], wait: CollectiveWait
    ) -> PendingCollective:
        members = self._groups.over(axes)
        mine = as_bytes(x)
        buffer = mine.new_empty(members.size * mine.numel())
        parts = list(buffer.split(mine.numel()) if mine.numel() else [mine] * members.size)
        is_nccl = members.backend == "nccl"
        gather = partial(dist.all_gather_into_tensor, buffer) if is_nccl else partial(dist.all_gather, parts)
        return self._started(
            wait,
            axes,
            lambda: gather(mine, members.handle, async_op=True),
            lambda: finish([from_bytes(part, x).reshape(x.shape) for part in members.in_order(parts)]),
        )

    def all_to_all(
        self,
        x: Tensor,
        chunks: Sequence[Tensor],
        axes: Axes,
        finish: Callable[[list[Tensor]], Result],
        wait: CollectiveWait,
        expected: Sequence[Sequence[int]] | None = None,
    ) -> PendingCollective:
        shapes = [torch.Size(shape) for shape in expected or [chunk.shape for chunk in chunks]]
        members = self._groups.over(axes)
        to_send = [as_bytes(chunk) for chunk in members.by_seat(chunks)]
        lengths = [part.numel() for part in to_send]
        sent = cat_or_view(to_send, 0)
        sizes = [0] * len(shapes)
        for seat, shape in zip(members.seats, shapes, strict=True):
            sizes[seat] = shape.numel() * x.element_size()
        received = sent.new_empty(sum(sizes))

        def end() -> Result:
            parts = zip(members.in_order(received.split(sizes)), shapes, strict=True)
            return finish([from_bytes(part, x).reshape(shape) for part, shape in parts])

        return self._started(
            wait,
            axes,
            lambda: dist.all_to_all_single(received, sent, sizes, lengths, members.handle, async_op=True),
            end,
        )

    def broadcast(self, x: Tensor, axes: Axes, source: int, wait: CollectiveWait) -> PendingCollective:
        members = self._groups.over(axes)
        buffer = as_bytes(x).clone()
        return self._started(
            wait,
            axes,
            lambda: dist.broadcast(buffer, members.ranks[source], members.handle, async_op=True),
            lambda: from_bytes(buffer, x).reshape(x.shape),
        )

    def _started(
        self, wait: CollectiveWait, axes: Axes, start: Callable[[], Waitable | None], finish: Callable[[], Any]
    ) -> PendingCollective:
        self._doing.announce()
        roll_call = self._groups.over(axes).roll_call

        def start_together() -> Waitable | None:
            if roll_call is not None:  # first, because gloo ends a process that receives more than it expects
                roll_call.ask().wait()
            return start()

        return PendingCollective(start_together, finish, wait)
