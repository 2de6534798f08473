"""Start of the processes: they connect to rank 0's watch before torch makes groups, so that missing ranks are named."""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import torch.distributed as dist

from ...errors import CollectiveError
from ..calls import CURRENT, brief
from ..launchers import Launch
from .connections import host_identity
from .watch import Name, Watch, missing_text, report_missing

START_VARIABLE = "FUNCTIONAL_PARALLEL_START_TIMEOUT"
_SECONDS = 600.0
_REPORT_EVERY = 30.0
_SLICE = 10.0  # seconds per attempt; torch writes a line each time an attempt to connect takes this long
_MARGIN = 5.0
_TO_CONNECT = 4.0
_FOR_LATE_RANKS = 8.0

_numbers = count(1)  # of watches
_active: weakref.WeakSet[Watch] = weakref.WeakSet()


def start_seconds() -> float:
    text = os.environ.get(START_VARIABLE, "") or str(_SECONDS)
    with suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ValueError(f"{START_VARIABLE}={text!r}: write a positive number of seconds, 120")


def launched_store(launch: Launch, timeout: float, name: Name = str) -> dist.Store:
    """Return the launcher's store. torchrun's outlives a restart, so each attempt has its own keys."""
    host, port, size = launch.address, launch.port, launch.size
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = launch.rank == 0 and not by_agent
    options: dict[str, Any] = {} if by_agent else {"multi_tenant": True}
    libuv = os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"
    where = "" if by_agent else f"it serves the store at {host}:{port}"
    clock = _Clock(partial(missing_text, [0], size, name=name), where)
    while True:
        try:
            store = dist.TCPStore(
                host, port, size, serves, clock.slice, wait_for_workers=False, use_libuv=libuv, **options
            )
            break
        except RuntimeError as error:
            if serves:
                raise
            clock.tick(f"; torch says: {error}")
            time.sleep(0.1)
    store.set_timeout(timedelta(seconds=timeout))
    return dist.PrefixStore(f"attempt/{_restart()}", store)


def _restart() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def watch_processes(
    store: dist.Store, rank: int, size: int, name: Name = str, has_failed: Callable[[], bool] | None = None
) -> Watch:
    store = dist.PrefixStore(f"functional_parallel/watch/{_restart()}/{next(_numbers)}", store)
    CURRENT.forget()
    try:
        watch = _listening(store, size, name) if rank == 0 else _connected(store, rank, size, name)
    except RuntimeError as error:
        if isinstance(error, CollectiveError):
            raise
        raise CollectiveError(
            f"{name(rank)}: the store that the processes find each other by failed while they started: {name(0)}, or "
            f"the launcher if it serves the store, has ended. torch says: {error}"
        ) from error
    _active.add(watch)
    atexit.register(_leave_at_exit, weakref.ref(watch))
    _wait_for_all(watch, size, name, has_failed)
    return watch


def _wait_for_all(watch: Watch, size: int, name: Name, has_failed: Callable[[], bool] | None) -> None:
    deadline = start_seconds() + (0 if watch.rank == 0 else _MARGIN)  # rank 0 knows the missing ranks
    began = time.monotonic()
    while not watch.here.wait(0.2):
        seconds = time.monotonic() - began
        if CURRENT.gone:
            _tell_late_ranks(watch)
            rank, how = next(iter(CURRENT.gone.items()))
            watch.leave("a rank that ended at the start")
            raise CollectiveError(f"{name(watch.rank)}: {name(rank)} {how} while the {size} processes started")
        if has_failed is not None and has_failed():
            CURRENT.learn(_FOR_LATE_RANKS)
            if CURRENT.gone or watch.here.is_set():
                continue
            text = f"a connection of the process group failed, and {watch.missing(seconds)}"
            watch.leave(f"CollectiveError: {text}")
            raise CollectiveError(f"{name(watch.rank)}: {text}")
        if seconds > deadline:
            text = watch.missing(seconds)
            watch.leave(f"CollectiveError: {text}")
            raise CollectiveError(f"{name(watch.rank)}: {text}. {_DEADLINE}")


def _tell_late_ranks(watch: Watch) -> None:
    """Keep rank 0 alive until every rank knows which rank died, or for some seconds."""
    deadline = time.monotonic() + _FOR_LATE_RANKS
    while watch.rank == 0 and watch.absent and time.monotonic() < deadline:
        time.sleep(0.1)


_DEADLINE = (
    f"Start all processes, on every host; set the environment variable {START_VARIABLE} to the number of seconds for "
    "which they wait for each other"
)


class _Clock:
    """Reports missing ranks every 30 s, and raises at the deadline. `slice` is the time between two looks at it."""

    def __init__(self, missing: Callable[[float], str], why: str = "") -> None:
        self._missing, self._why = missing, why
        self._began = self._reported = time.monotonic()
        self._deadline = start_seconds()
        self.slice = timedelta(seconds=min(_SLICE, self._deadline / 4))

    def tick(self, last: str = "") -> None:
        now = time.monotonic()
        if now - self._began > self._deadline:
            text = self._missing(now - self._began)
            why = f" ({self._why})" if self._why else ""
            raise CollectiveError(f"{text}{why}. {_DEADLINE}{last}")
        if now - self._reported > _REPORT_EVERY:
            self._reported = now
            report_missing(self._missing(now - self._began))


def _listening(store: dist.Store, size: int, name: Name) -> Watch:
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    else:
        listener = socket.create_server(("", 0), backlog=4096)
    secret = secrets.token_hex(16)
    known = {"port": listener.getsockname()[1], "secret": secret, "hosts": own_addresses(), "host": host_identity()}
    store.set("address", json.dumps(known))
    return Watch(0, size, name, listener=listener, secret=secret, unreached=partial(_unreached, store))


def _unreached(store: dist.Store, ranks: list[int]) -> list[int]:
    with suppress(RuntimeError):
        return [rank for rank in ranks if store.check([f"unreached/{rank}"])]
    return []


def _connected(store: dist.Store, rank: int, size: int, name: Name) -> Watch:
    clock = _Clock(partial(missing_text, [0], size, name=name))
    while True:
        try:
            store.wait(["address"], clock.slice)
            break
        except dist.DistStoreError as error:
            if "timeout" not in str(error).lower():
                raise
            clock.tick()
    known = json.loads(store.get("address"))
    own = host_identity() == known["host"]
    hosts = [host for host in dict.fromkeys(known["hosts"]) if own or not host.startswith(("127.", "localhost", "::1"))]
    for host in ["127.0.0.1", *hosts] if own else hosts:
        try:
            hub = socket.create_connection((host, known["port"]), timeout=_TO_CONNECT)
        except ConnectionRefusedError as error:
            if own:
                raise CollectiveError(f"{name(rank)}: {name(0)} ended while the {size} processes started") from error
        except OSError:
            continue
        else:
            return Watch(rank, size, name, hub=hub, secret=known["secret"])
    store.set(f"unreached/{rank}", "")
    print(
        f"functional_parallel: {name(rank)} cannot connect to {name(0)} at {', '.join(hosts)}, port {known['port']}: "
        "where it waits for a rank that died, only the timeout ends it",
        file=sys.stderr,
        flush=True,
    )
    watch = Watch(rank, size, name)
    watch.here.set()
    return watch


def own_addresses() -> list[str]:
    """Return names and addresses of this host for other hosts, the most likely one first."""
    found = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return [host for host in found if host]


def _leave_at_exit(watch: weakref.ref[Watch]) -> None:
    if (active := watch()) is not None:
        error = getattr(sys, "last_value", None)
        active.leave("" if error is None else brief(error))


def _abandon_in_child() -> None:
    """Close the connections in a forked process. If it held them, its parent's death would not be noticed."""
    for watch in list(_active):
        watch.abandon()
    CURRENT.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_in_child)
