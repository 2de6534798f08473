"""`fp.launch`: ranks of one call, as processes of this host."""

from __future__ import annotations

import importlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..errors import CallMismatchError, CollectiveError, LaunchError
from .default import forget_runtimes, rank, world_size

Result = TypeVar("Result")

_HOST = "127.0.0.1"
_TO_END = 10.0  # seconds from a rank's result to its end
_LOOK_EVERY = 1.0
_FAR = 2  # an error about other ranks: one of them has failed, or ends at the same time
_NO_THREADS = "autograd's threading"  # of torch's message
_SPAWN = (
    "\nautograd of the process that called fp.launch has threads, because of a backward on a device or a deeply nested "
    "one; a fork lacks them: pass start='spawn'"
)


class _LaunchedRank(NamedTuple):
    process: BaseProcess
    pipe: Any


class _Failure(NamedTuple):
    text: str
    distance: int
    pickled: bytes = b""


def launch(f: Callable[..., Result], ranks: int, *args: Any, start: str | None = None) -> list[Result]:
    """Call `f(*args)` on several ranks, each a process of this host, and return all results.

    >>> import functional_parallel as fp, torch
    >>> from sharding_specs import Mesh, P
    >>> def total(x):
    ...     add = fp.compile(lambda x: fp.psum(x.sum(), "data"), Mesh(data=2), in_specs=P("data"), out_specs=P())
    ...     return fp.rank(), add(x).item()
    >>> fp.launch(total, 2, torch.arange(4.0))
    [(0, 6.0), (1, 6.0)]

    It ends when all ranks have returned, or when one has failed. All processes have then ended. Ctrl-C ends them too.
    A rank computes with one thread, unless it calls `torch.set_num_threads`. After "fork", `f` does not run in the main
    thread of its process, so it cannot set signal handlers.

    Args:
        f: called on each rank; `fp.rank()` is the rank's number. With "fork" it may be any function, also of a
            notebook. With "spawn" it must be importable, or the package cloudpickle installed.
        ranks: the number of processes.
        args: arguments of `f`.
        start: "fork", a copy of this process, or "spawn", a new one, where a script needs
            `if __name__ == "__main__":`. By default "fork" on Linux without CUDA devices, else "spawn", because CUDA
            does not work in a fork.

    Returns:
        The results, in rank order. Their tensors are on the CPU.

    Raises:
        LaunchError: if a rank raised an error, which is this error's cause, or ended without a result; if this
            process is itself a rank; or if `f` cannot be sent to a new process.
        ValueError: if `ranks` is not a positive number, or `start` is unknown.
    """
    context = multiprocessing.get_context(_start_method(ranks, start))
    call: Any = (f, args) if context.get_start_method() == "fork" else _pickled(f, args)
    running: list[_LaunchedRank] = []
    store = None
    try:
        for number in range(ranks):
            running.append(_started(context, number, ranks, call))
        store = dist.TCPStore(_HOST, 0, None, True, timedelta(seconds=_TO_END), wait_for_workers=False)
        for each in running:
            with suppress(OSError):  # it has ended, which the next line reports
                each.pipe.send(store.port)
        results = _collected(running)
        deadline = time.monotonic() + _TO_END
        for each in running:
            each.process.join(max(0.0, deadline - time.monotonic()))
        return results
    finally:
        store = None  # else a stored traceback would keep its port open
        for each in running:
            each.process.kill()
        for each in running:
            each.process.join()
            each.process.close()
            each.pipe.close()


def _start_method(ranks: int, start: str | None) -> str:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ValueError(f"ranks={ranks!r}: write the number of processes, 2")
    known = multiprocessing.get_all_start_methods()
    if start not in (None, "fork", "spawn") or (start and start not in known):
        raise ValueError(f"start={start!r}: write 'fork' or 'spawn'; this system supports {', '.join(known)}")
    if not dist.is_available():
        raise LaunchError("this torch is built without torch.distributed: ranks are simulated in one process")
    if dist.is_initialized() or world_size() > 1:
        raise LaunchError(
            f"this process is rank {rank()} of {world_size()} itself: call fp.launch in a script that no launcher "
            "started, or call the function directly on each rank"
        )
    if start == "fork" and torch.cuda.is_initialized():
        raise LaunchError("start='fork': CUDA is initialised in this process and does not work in a fork; use 'spawn'")
    return start or ("fork" if sys.platform == "linux" and not torch.cuda.device_count() else "spawn")


def _pickled(f: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    advice = "write it at the top level of a module, or install cloudpickle"
    try:
        dumps = importlib.import_module("cloudpickle").dumps
    except ImportError:
        dumps = pickle.dumps
        if f.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
            raise LaunchError(f"a new process cannot find {f!r}: its module has no file; {advice}") from None
    try:
        result: bytes = dumps((f, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(f"{f!r} or an argument cannot be sent to a new process ({error}): {advice}") from error
    return result


def _started(context: Any, number: int, ranks: int, call: Any) -> _LaunchedRank:
    mine, its = context.Pipe()
    process = context.Process(target=_run, args=(number, ranks, its, call), name=f"rank {number}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        process.start()
    its.close()  # so that the pipe ends when the process does
    return _LaunchedRank(process, mine)


# --- On a rank ---


def _run(number: int, ranks: int, pipe: Any, call: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that called `launch` ends its ranks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)  # as torchrun does
    forget_runtimes()
    rank = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": _HOST}
    os.environ.update({name: str(value) for name, value in rank.items()})
    # The store is in the process that called `launch`, as torchrun's is in its agent.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    if isinstance(call, bytes):
        _answer(pipe, call)
    else:  # OpenMP waits forever for threads that a fork lacks, but another thread of ours has others
        thread = threading.Thread(target=_answer, args=(pipe, call))
        thread.start()
        thread.join()


def _answer(pipe: Any, call: Any) -> None:
    try:
        os.environ["MASTER_PORT"] = str(pipe.recv())
        f, args = pickle.loads(call) if isinstance(call, bytes) else call
        result = io.BytesIO()
        torch.save(f(*args), result)  # as bytes: tensors in shared memory would end with this process
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(result.getvalue())
    except BaseException as error:
        pipe.send(_failure(error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _failure(error: BaseException) -> _Failure:
    pickled = b""
    with suppress(Exception):
        pickled = pickle.dumps(error)
    distance = _FAR if isinstance(error, (CollectiveError, CallMismatchError)) else 0
    advice = _SPAWN if _NO_THREADS in str(error) else ""
    return _Failure(f"raised\n{traceback.format_exc()}{advice}", distance, pickled)


# --- Results and failures of ranks ---


def _collected(running: list[_LaunchedRank]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    deadline = float("inf")
    while len(results) + len(failures) < len(running) and time.monotonic() < deadline:
        silent = {number: each for number, each in enumerate(running) if number not in results.keys() | failures.keys()}
        connection.wait([each.pipe for each in silent.values()], min(_LOOK_EVERY, deadline - time.monotonic()))
        for number, each in silent.items():
            _look(number, each, results, failures)
        if any(failure.distance < _FAR for failure in failures.values()):
            break
        if failures:  # the cause may not have arrived yet
            deadline = min(deadline, time.monotonic() + _LOOK_EVERY)
    if failures:
        raise _error(failures, len(running))
    return [results[number] for number in range(len(running))]


def _look(number: int, rank: _LaunchedRank, results: dict[int, Any], failures: dict[int, _Failure]) -> None:
    ended = not rank.process.is_alive()  # read first: all that an ended process sent has arrived
    try:
        sent = rank.pipe.recv() if rank.pipe.poll() else None
    except (EOFError, OSError):
        sent, ended = None, True
    if isinstance(sent, _Failure):
        failures[number] = sent
    elif sent is not None:
        results[number] = torch.load(io.BytesIO(sent), map_location="cpu", weights_only=False)
    elif ended:
        rank.process.join(_TO_END)
        code = rank.process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        failures[number] = _Failure(f"{how} before it returned", 1)


def _error(failures: dict[int, _Failure], ranks: int) -> LaunchError:
    number, failure = min(failures.items(), key=lambda each: (each[1].distance, each[0]))
    error = LaunchError(f"rank {number} of {ranks} {failure.text}")
    with suppress(Exception):  # the class of an error may not accept its own pickled arguments
        error.__cause__ = pickle.loads(failure.pickled)
    return error
