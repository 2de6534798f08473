"""Run one function on several real processes, and get every rank's result back.

A rank that raises ends the run at once with its traceback; a run that hangs ends at the timeout.

Importing torch takes seconds, so every rank is forked from a process that did only this. There are two such processes,
for even and odd ranks, since in those of a launcher Python's hashes differ, and so the order of sets.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import functional_parallel as fp

from . import process_settings  # noqa: F401
from .devices import backend_of_ranks, use_device

__all__ = ["RankError", "connect", "free_port", "outcome", "run_on_processes"]


class RankError(AssertionError):
    """What a rank raised, as text, since its process is gone."""


def run_on_processes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 150.0, deaths: bool = False
) -> list[Any]:
    """Run `fn(rank, *args)` on `world_size` processes: on gloo, or on CUDA as `tests.devices` says.

    Args:
        fn: a function at the top level of its module, so that it can be pickled.
        world_size: the number of processes.
        args: passed on; must be picklable.
        timeout: seconds for everything together.
        deaths: whether a rank may die without a result; its result is its exit code.

    Returns:
        The results, in rank order.

    Raises:
        RankError: with what the first rank that failed raised, or who died, or who was not done in time.
    """
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    work = pickle.dumps((fn, args))  # a rank loads the module of `fn`, with its tensors, when its device is chosen
    launched = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    workers = [
        context.Process(target=_worker, args=(work, rank, {**os.environ, **launched}, results, timeout), daemon=True)
        for rank in range(world_size)
    ]
    servers = [_server(rank) for rank in range(world_size)]
    for worker, server in zip(workers, servers, strict=True):
        with patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            worker.start()
    try:
        return _collect(results, workers, time.monotonic() + timeout, deaths)
    finally:
        for worker in workers:
            worker.join(timeout=1.0)
            if worker.is_alive():
                worker.kill()
                worker.join()


def _server(rank: int) -> forkserver.ForkServer:
    """The process that a rank is forked from."""
    return _server_with_own_hashes(rank % 2)


@cache
def _server_with_own_hashes(number: int) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([__name__, "torch._dynamo"])  # torch imports the second when it first traces
    server.ensure_running()
    return server


def _collect(results: Any, workers: list[Any], deadline: float, deaths: bool) -> list[Any]:
    done: dict[int, Any] = {}
    while len(done) < len(workers):
        died = {rank: worker.exitcode for rank, worker in enumerate(workers) if worker.exitcode}
        try:
            rank, failed, payload = results.get(timeout=0.1)
        except queue.Empty:
            done.update(_dead(died, done, deaths))
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(workers))) - set(done))
                raise RankError(f"ranks {missing} of {len(workers)} were not done in time") from None
            continue
        if failed:
            raise RankError(f"rank {rank} of {len(workers)} raised:\n{payload}")
        done[rank] = torch.load(io.BytesIO(payload), weights_only=False)
    return [done[rank] for rank in range(len(workers))]


def _dead(died: dict[int, int], done: dict[int, Any], allowed: bool) -> dict[int, int]:
    """Ranks that ended without a result: nothing arrived after they were seen dead."""
    silent = {rank: code for rank, code in died.items() if rank not in done}
    if silent and not allowed:
        raise RankError(f"ranks died without a word: {silent} (rank: exit code)")
    return silent


def _worker(work: bytes, rank: int, environment: dict[str, str], results: Any, timeout: float) -> None:
    os.environ.clear()  # of the process that this one was forked from, which began before the test
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    use_device(rank)
    try:
        fn, args = pickle.loads(work)
        connect(timeout)
        payload = io.BytesIO()
        torch.save(fn(rank, *args), payload)  # as bytes: shared-memory tensors would die with this process
        if dist.is_initialized():
            dist.destroy_process_group()
        results.put((rank, False, payload.getvalue()))
    except BaseException:
        results.put((rank, True, traceback.format_exc()))
    results.close()
    results.join_thread()


def connect(timeout: float, **options: Any) -> None:
    """Make the process group, and return when all ranks have: one that lets go at once breaks what others still make.

    Args:
        timeout: of the group, in seconds.
        options: of `init_process_group`.
    """
    backend = backend_of_ranks(int(os.environ["WORLD_SIZE"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout), **options)
    dist.barrier()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def outcome(run: Callable[[], Any]) -> tuple[str, str, float]:
    """What became of a call on this rank: the kind of error and its text, or "nothing", and seconds."""
    began = time.monotonic()
    try:
        run()
    except (fp.CallMismatchError, fp.CollectiveError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", "", time.monotonic() - began
