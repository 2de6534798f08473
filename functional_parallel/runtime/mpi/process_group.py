"""Process group of torch.distributed by MPI's nonblocking calls. No other module imports mpi4py at its top."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from ..calls import CURRENT
from ..joined import flat_if_adjacent

_DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}
_REDUCTIONS = {dist.ReduceOp.SUM: MPI.SUM, dist.ReduceOp.MAX: MPI.MAX, dist.ReduceOp.MIN: MPI.MIN}
_LARGEST_TAG = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
_SPINS = 50  # tests of a request before the process sleeps between two of them
_PAUSE = 50e-6

_abandoned: list[_Work] = []  # failed waits: MPI may still write into their memory


def create(options: Any, _: Any) -> dist.ProcessGroup:
    """Return the group for the options of torch.distributed. Its ranks are the ranks of MPI's world."""
    ranks = options.global_ranks_in_group or range(options.group_size)
    members = MPI.COMM_WORLD.Get_group().Incl(list(ranks))
    communicator = MPI.COMM_WORLD.Create_group(members)
    return _MPIProcessGroup(communicator, options.timeout)


class _MPIProcessGroup(dist.ProcessGroup):
    def __init__(self, communicator: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(communicator.rank, communicator.size)  # type: ignore[call-arg]
        self._communicator, self._seconds = communicator, timeout.total_seconds()

    def size(self) -> int:
        return int(self._communicator.size)

    def rank(self) -> int:
        return int(self._communicator.rank)

    def getBackendName(self) -> str:
        return "mpi4py"

    # --- collectives ---

    def allreduce(self, tensors: Sequence[Tensor], options: Any = None) -> _Work:  # type: ignore[override]
        (x,) = tensors
        how = dist.ReduceOp.SUM if options is None else options.reduceOp
        operation = next(ours for theirs, ours in _REDUCTIONS.items() if how == theirs)
        memory = [_bytes(x), x.numel(), _DATATYPES[x.dtype]]
        return self._started([self._communicator.Iallreduce(MPI.IN_PLACE, memory, operation)], x)

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any = None
    ) -> _Work:
        (parts,), (x,) = outputs, inputs
        gathered = flat_if_adjacent(parts)
        into = parts[0].new_empty(len(parts) * x.numel()) if gathered is None else gathered

        def finish() -> None:
            for part, found in zip(parts, into.split(x.numel()) if x.numel() else (), strict=False):
                part.view(-1).copy_(found)

        request = self._communicator.Iallgather(_raw(x), _raw(into))
        return self._started([request], x, into, finish=finish if gathered is None else None)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> _Work:  # type: ignore[override]
        (x,) = tensors
        return self._started([self._communicator.Ibcast(_raw(x), options.rootRank)], x)

    def all_to_all_single(
        self, output: Tensor, x: Tensor, expected: Sequence[int], sizes: Sequence[int], options: Any = None
    ) -> _Work:
        into, sent = (_by_rank(each, counts, self.size()) for each, counts in ((output, expected), (x, sizes)))
        return self._started([self._communicator.Ialltoallv(sent, into)], x, output)

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # the name in torch 2.11

    def barrier(self, opts: Any = None) -> _Work:
        return self._started([self._communicator.Ibarrier()])

    # --- messages ---

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> _Work:
        (x,) = tensors
        return self._started([self._communicator.Isend(_raw(x), to, min(tag, _LARGEST_TAG))], x)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> _Work:
        (x,) = tensors
        return self._started([self._communicator.Irecv(_raw(x), source, min(tag, _LARGEST_TAG))], x)

    def _started(self, requests: list[MPI.Request], *held: Tensor, finish: Callable[[], None] | None = None) -> _Work:
        return _Work(requests, held, self._seconds, finish)


class _Work(dist.Work):
    def __init__(
        self, requests: list[MPI.Request], held: Sequence[Tensor], seconds: float, finish: Callable[[], None] | None
    ) -> None:
        super().__init__()
        self._requests, self._held, self._seconds, self._finish = requests, held, seconds, finish

    def is_completed(self) -> bool:
        return bool(MPI.Request.Testall(self._requests))

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = self._seconds if not timeout else timeout.total_seconds()
        began, spins = time.monotonic(), 0
        while not MPI.Request.Testall(self._requests):
            if CURRENT.lost is not None or time.monotonic() - began > seconds:
                _abandoned.append(self)
                raise RuntimeError("ended by the watch" if CURRENT.lost is not None else f"timed out after {seconds} s")
            spins += 1
            if spins > _SPINS:
                time.sleep(_PAUSE)
        if self._finish is not None:
            self._finish()
            self._finish = None
        return True


def _bytes(x: Tensor) -> MPI.buffer:
    assert x.is_contiguous() and x.device.type == "cpu", "MPI reads and writes contiguous tensors in main memory"
    return MPI.buffer.fromaddress(x.data_ptr(), x.nbytes)


def _raw(x: Tensor) -> list[Any]:
    return [_bytes(x), MPI.BYTE]


def _by_rank(x: Tensor, counts: Sequence[int], size: int) -> list[Any]:
    row = x.nbytes // x.shape[0] if x.shape[0] else 0
    return [_bytes(x), [count * row for count in counts or [x.shape[0] // size] * size], MPI.BYTE]
