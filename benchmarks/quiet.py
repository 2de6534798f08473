"""Ours without its communication: the same program on every rank, each result of a collective there at once.

What a step of that takes is what the step would take if the ranks were joined by a way without latency and without end
to its bandwidth. The ops, their order and their shapes are those of the step that is compared, and all ranks compute at
the same time; only values are others.

A pipeline's ranks do not wait for each other then, but a schedule has waiting in it. So what counts of a pipeline is
when the simulator says that its schedule ends, given each stage's own times and messages that take no time; and what a
rank does before and after its actions.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from makespan import ends, ordinary
from ours import Ours

from functional_parallel.collectives import CollectiveCall
from functional_parallel.runtime import (
    ProcessCommunicator,
    ProcessRuntime,
    Transport,
    default_runtime,
    use_runtime,
)
from functional_parallel.schedules import Event
from functional_parallel.shared_memory import ZeroCopyProgram
from functional_parallel.shared_memory.packed import LazyBucket, to_tensor
from functional_parallel.shared_memory.unpacked import BucketLayout, FlatOutputs, SlicedBucket
from sharding_specs import Mesh

__all__ = ["Quiet"]

_WARM_UP = 1  # noted steps that do not count
Axes = tuple[str, ...]


class Quiet:
    """A contestant that sends nothing; the same face as what it is made of.

    Args:
        ours: what steps.
    """

    def __init__(self, ours: Ours) -> None:
        self._ours = ours
        self._runtime: SilentRuntime | None = None
        self._steps: list[tuple[list[Event], float]] = []  # of a pipeline: its actions, and all else in seconds

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        speaking = default_runtime(self._ours.mesh)
        self._runtime = self._runtime or SilentRuntime(self._ours.mesh)
        self._runtime.communicator.rewind()
        use_runtime(self._runtime)
        try:
            began = time.perf_counter()
            loss = self._ours.step(tokens)
            seconds = time.perf_counter() - began - self._runtime.communicator.seconds
        finally:
            use_runtime(speaking)
        if self._ours.schedule is not None:
            self._note(self._ours.train.program, seconds)
        return loss

    def _note(self, program: Any, seconds: float) -> None:
        if program.events is None:
            program.record()
            return
        events = list(program.events)
        self._steps.append((events, seconds - sum(event.end - event.start for event in events)))

    def makespan(self) -> float | None:
        """Seconds of a pipeline's step as simulated; None when it is no pipeline. All ranks must ask."""
        if self._ours.schedule is None:
            return None
        own = ordinary(events for events, _ in self._steps[_WARM_UP:])
        rest = statistics.median(rest for _, rest in self._steps[_WARM_UP:])
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (own, rest))
        events = [event for events, _ in ranks for event in events]
        return ends(self._ours.train.program.schedule, events, [rest for _, rest in ranks])


class SilentRuntime(ProcessRuntime):
    """One rank of a mesh to which the others never speak. Making it is a collective."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, algorithm="backend")
        self.communicator: SilentCarrier = SilentCarrier(mesh)
        self._transport = Transport(SilentCarrier, ZeroCopyProgram)
        self.agree, self.exchange = _agreed, self._alone

    def _alone(self, value: Any, purpose: str) -> list[Any]:
        """What all ranks have, as far as this one knows."""
        return [value]

    def agree_on(self, program: Any) -> None:
        """Nobody else runs it."""
        program.cache["doing"] = f"runs {program.name}"

    def check_sums(self, name: str, paths: Sequence[str], sums: Sequence[str], parts: Any = None) -> None:
        """Nothing to do."""


def _agreed(doing: str, otherwise: str, number: int = 0) -> int:
    return number


class SilentCarrier(ProcessCommunicator):
    """Has the result of every collective at once.

    That of a sum over ranks is the rank's own part. All others are made of the rank's own values when a step asks
    first, and are the same tensor in each later step.

    Attributes:
        seconds: what it took to fill messages since the last `rewind`, which is nobody's computing.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, algorithm="backend")
        self._results: list[torch.Tensor] = []
        self._letters: dict[int, torch.Tensor] = {}
        self.rewind()

    def rewind(self) -> None:
        """A step begins."""
        self._turn, self.seconds = 0, 0.0

    def start(
        self,
        call: CollectiveCall,
        x: torch.Tensor | LazyBucket,
        *,
        layout: BucketLayout | None = None,
        **options: Any,
    ) -> Any:
        if call.kind == "psum" and isinstance(x, LazyBucket) and layout is not None:  # ours sends from there, too
            return _There(FlatOutputs(x.results()))
        result = getattr(self, call.kind)(to_tensor(x), call.axes, **call.routing)
        return _There(result if layout is None else SlicedBucket(layout, result))

    def psum(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        return x.contiguous()

    def pmax(self, x: torch.Tensor, axes: Axes) -> torch.Tensor:
        return x.contiguous()

    pmin = pmax

    def pbroadcast(self, x: torch.Tensor, axes: Axes, source: int) -> torch.Tensor:
        return x.contiguous()

    def ppermute(self, x: torch.Tensor, axes: Axes, pairs: Sequence[int]) -> torch.Tensor:
        return x.contiguous()

    def psum_scatter(self, x: torch.Tensor, axes: Axes, dim: int) -> torch.Tensor:
        return self._kept(_divided(x.shape, dim, self._size(axes)), x)

    def all_gather(self, x: torch.Tensor, axes: Axes, dim: int) -> torch.Tensor:
        return self._kept(_multiplied(x.shape, dim, self._size(axes)), x)

    def all_to_all(self, x: torch.Tensor, axes: Axes, split_dim: int, concat_dim: int) -> torch.Tensor:
        size = self._size(axes)
        return self._kept(_multiplied(_divided(x.shape, split_dim, size), concat_dim, size), x)

    def _size(self, axes: Axes) -> int:
        return self.mesh.axis_size(axes)

    def _kept(self, shape: list[int], x: torch.Tensor) -> torch.Tensor:
        """The result that this turn of a step had before."""
        if self._turn == len(self._results):
            self._results.append(x.new_empty(0))
        if list(self._results[self._turn].shape) != shape or self._results[self._turn].dtype != x.dtype:
            count = torch.Size(shape).numel()
            self._results[self._turn] = x.detach().flatten().repeat(-(-count // max(1, x.numel())))[:count].view(shape)
        self._turn += 1
        return self._results[self._turn - 1]

    # --- messages ---

    def messages(self, axes: Axes, device: torch.device) -> Any:
        return self

    def send(self, x: torch.Tensor, to: int) -> Any:
        return _THERE

    def receive(self, into: torch.Tensor, source: int) -> Any:
        """Fill with ordinary numbers: what a new buffer holds may be some that take processors long."""
        began = time.perf_counter()
        if into.numel() not in self._letters:
            self._letters[into.numel()] = (torch.rand(into.numel() // 4 + 1) + 0.5).view(torch.uint8)[: into.numel()]
        into.copy_(self._letters[into.numel()])
        self.seconds += time.perf_counter() - began
        return _THERE


class _There:
    """What starting a collective returns."""

    __slots__ = ("value", "where")

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def wait(self) -> Any:
        return self.value

    def is_completed(self) -> bool:
        return True


_THERE = _There()


def _divided(shape: Sequence[int], dim: int, by: int) -> list[int]:
    return [size // by if index == dim % len(shape) else size for index, size in enumerate(shape)]


def _multiplied(shape: Sequence[int], dim: int, by: int) -> list[int]:
    return [size * by if index == dim % len(shape) else size for index, size in enumerate(shape)]
