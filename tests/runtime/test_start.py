"""Ranks that do not arrive when the processes start: the others name them, and stop at a deadline that can be set."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from functional_parallel.runtime import ProcessRuntime, launch_of_environment
from functional_parallel.runtime.watch import START_VARIABLE, launched_store, start, start_seconds, watch
from sharding_specs import Mesh
from tests.processes import _server, free_port, run_on_processes

DEAD = 17


# -----------------------------------------------------------------------------
# Processes that start
# -----------------------------------------------------------------------------


def on_rank(rank: int, environment: dict[str, str], absent: int, dies: str, every: float, folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank))
    os.dup2(os.open(f"{folder}/errors-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    start._REPORT_EVERY = watch._REPORT_EVERY = every
    if dies == "after the script's group":
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
        dist.barrier()
    if rank == absent:
        die(dies)
    ProcessRuntime(Mesh(data=2, tensor=2), timeout=120)
    time.sleep(30)


def die(dies: str) -> None:
    """End this process at a moment of its start."""
    if dies == "after it arrived":
        start._wait_for_all = lambda *_: os._exit(DEAD)
    elif dies == "while groups are made":
        dist.init_process_group = lambda *_, **__: os._exit(DEAD)
    else:
        os._exit(DEAD)


def outcomes(absent: int, dies: str, seconds: float, folder: Path, every: float = 30.0) -> tuple[list[str], float]:
    """Start four processes, one of which dies; return the errors of each, and the seconds until all have ended."""
    environment = {
        **os.environ,
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        START_VARIABLE: str(seconds),
    }
    run_on_processes(str, 4)  # the servers of ranks have then imported torch, which takes longer than a start
    context = multiprocessing.get_context("forkserver")
    arguments = (environment, absent, dies, every, str(folder))
    ranks = [context.Process(target=on_rank, args=(rank, *arguments), daemon=True) for rank in range(4)]
    try:
        for rank, process in enumerate(ranks):
            with patch.object(forkserver, "connect_to_new_process", _server(rank).connect_to_new_process):
                process.start()
        while not all((folder / f"errors-{rank}").exists() for rank in range(4)):
            time.sleep(0.01)
        began = time.monotonic()
        for process in ranks:
            process.join(max(0.0, began + 60 - time.monotonic()))
        passed = time.monotonic() - began
        assert [process.exitcode for process in ranks] == [DEAD if rank == absent else 1 for rank in range(4)]
    finally:
        for process in ranks:
            process.kill()
    return [(folder / f"errors-{rank}").read_text() for rank in range(4)], passed


# -----------------------------------------------------------------------------
# Laws
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [0, 2])
@pytest.mark.every(2)
def test_a_rank_that_never_arrives_is_reported_and_then_refused(absent: int, tmp_path: Path) -> None:
    """Reports come every 30 s; every 2 s here."""
    errors, seconds = outcomes(absent, "before it arrived", 10.0, tmp_path, every=2.0)
    name = ["rank 0 (data=0, tensor=0)", "", "rank 2 (data=1, tensor=0)"][absent]
    assert seconds < 30.0
    report = rf"functional_parallel: 1 of 4 ranks did not arrive in \d+ s: {re.escape(name)}"
    assert any(re.search(report, text) for text in errors), errors
    for rank, text in enumerate(errors):
        last = text.splitlines()[-1] if text else ""
        assert rank == absent or ("CollectiveError: " in last and name in last), text
    told = next(text for rank, text in enumerate(errors) if rank != absent)
    assert f"set the environment variable {START_VARIABLE}" in told


@pytest.mark.parametrize(
    ("absent", "dies"),
    [(0, "after it arrived"), (2, "after it arrived"), (2, "while groups are made"), (1, "after the script's group")],
)
@pytest.mark.every(3)
def test_a_rank_that_dies_during_the_start_ends_the_others_at_once(absent: int, dies: str, tmp_path: Path) -> None:
    deadline = 600.0 if absent else 12.0  # others may come to a store that is gone already
    errors, seconds = outcomes(absent, dies, deadline, tmp_path)
    assert seconds < 30.0
    for rank, text in enumerate(errors):
        last = [line for line in text.splitlines() if "CollectiveError: " in line][-1:]
        assert rank == absent or (last and f"rank {absent} (data=" in last[0]), (rank, text)


def test_the_deadline_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(START_VARIABLE, "2.5")
    assert start_seconds() == 2.5
    for wrong in ("soon", "-1", "0", "nan"):
        monkeypatch.setenv(START_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{START_VARIABLE}='{wrong}': write a positive number of seconds"):
            start_seconds()
    monkeypatch.delenv(START_VARIABLE)
    assert start_seconds() == 600


def test_attempts_of_torchrun_do_not_share_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store outlives a restart. A rank that read an address of the last attempt would connect to nobody."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    launch = launch_of_environment()
    assert launch is not None
    stores = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        stores.append(launched_store(launch, 10.0))
    stores[0].set("address of rank 1", "of the first attempt")
    assert stores[0].check(["address of rank 1"]) and not stores[1].check(["address of rank 1"])
