"""What a process does around its steps: init and let go of processes, fork, start threads, take signals."""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import functional_parallel as fp
from functional_parallel.errors import DonatedStateError
from functional_parallel.runtime import ProcessRuntime, default_runtime, use_runtime
from sharding_specs import Mesh
from tests.processes import connect, outcome, run_on_processes

MESH = Mesh(data=2)
X = torch.arange(16, dtype=torch.float64).reshape(4, 4) % 5
W = torch.eye(4, dtype=torch.float64)
FOREVER = 60.0  # seconds; nothing waits so long but a test that fails

inside: list[Callable[[], None]] = []  # what a step does when it runs, where something is here


@torch.library.custom_op("tests_lifetimes::do", mutates_args=())
def do(x: torch.Tensor) -> torch.Tensor:
    if inside:
        inside.pop()()
    return x.clone()


@do.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


fp.register_rule(torch.ops.tests_lifetimes.do, "... -> ...")


def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (do(x) @ w).square().mean()


class Training:
    def __init__(self) -> None:
        self.train = fp.train_step(loss, fp.optim.sgd(0.01, momentum=0.5), MESH, fp.zero(3, "data"))
        self.state = self.train.init(W)

    def step(self) -> float:
        self.state, metrics = self.train(self.state, X)
        return float(metrics.loss)

    def params(self) -> torch.Tensor:
        found: torch.Tensor = self.train.params(self.state)
        return found


def init_again(rank: int, folder: str, name: str, seconds: float = FOREVER) -> None:
    connect(seconds, init_method=f"file://{folder}/{name}", rank=rank, world_size=2)


# -----------------------------------------------------------------------------
# Processes that are initialised late, let go, and initialised again
# -----------------------------------------------------------------------------


def on_processes_that_are_let_go(rank: int, folder: str) -> dict[str, Any]:
    run, other = Training(), Training()
    losses = [run.step() for _ in range(2)]
    dist.destroy_process_group()
    let_go = outcome(run.step)
    init_again(rank, folder, "again")
    first = default_runtime(MESH)
    losses += [run.step() for _ in range(2)]
    wanted = [other.step() for _ in range(4)]
    program = run.train.program.cache["process"][0]
    use_runtime(ProcessRuntime(MESH, reduction="ordered"))
    run.step()
    dist.destroy_process_group()
    init_again(rank, folder, "once more")
    return {
        "chosen": outcome(run.step),
        "let go": let_go,
        "losses": losses,
        "wanted": wanted,
        "new": program is first.communicator,
    }


def test_processes_that_are_let_go_and_initialised_again(tmp_path: Path) -> None:
    for found in run_on_processes(on_processes_that_are_let_go, 2, str(tmp_path)):
        kind, message, _ = found["let go"]
        assert kind == "CollectiveError" and "destroy_process_group() has ended" in message
        assert found["losses"] == found["wanted"] and found["new"]
        assert found["chosen"][0] == "CollectiveError" and "init_process_group and use_runtime" in found["chosen"][1]


def on_processes_that_are_initialised_late(rank: int, folder: str) -> dict[str, Any]:
    dist.destroy_process_group()
    environment = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    early = Training()
    early.step()
    os.environ.update(environment)
    init_again(rank, folder, "late")
    with pytest.raises(ValueError, match="of step 1, lies with simulated ranks") as error:
        early.step()
    with pytest.raises(ValueError, match="lies with simulated ranks"):
        early.params()
    late = Training()
    late.step()
    return {"error": str(error.value), "rows": late.state.handles[0].shape[0]}


def test_processes_that_are_initialised_after_the_first_use(tmp_path: Path) -> None:
    """Each process went on to simulate all ranks by itself, without a word."""
    for found in run_on_processes(on_processes_that_are_initialised_late, 2, str(tmp_path)):
        assert "init_process_group before train.init" in found["error"]
        assert found["rows"] == 2, "half of the rows, on a real rank"


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"])
def test_many_processes_that_each_simulate_all_ranks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "3")
    if name == "WORLD_SIZE":
        monkeypatch.setenv("RANK", "0")
    with pytest.warns(
        RuntimeWarning, match=rf"\({name}=3\), but this process simulates all 2 ranks.*MASTER_ADDR, MASTER_PORT"
    ):
        default_runtime(Mesh(**{f"of_{name}".lower(): 2}))


def on_a_group_with_a_short_timeout(rank: int, folder: str) -> tuple[str, str, float]:
    dist.destroy_process_group()
    init_again(rank, folder, "short", seconds=3)
    run, done = Training(), Path(folder) / "done"
    run.step()
    if rank == 1:
        return wait_for(done), "", 0.0
    told = outcome(run.step)
    done.touch()
    return told


def wait_for(done: Path) -> str:
    end = time.monotonic() + FOREVER
    while not done.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return "there" if done.exists() else "not there"


def test_the_timeout_of_the_users_own_process_group_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCTIONAL_PARALLEL_ALGORITHM", "shared")  # the backend has another message
    told, other = run_on_processes(on_a_group_with_a_short_timeout, 2, str(tmp_path))
    assert told[0] == "CollectiveError" and "no signal from rank 1" in told[1], told
    assert other[0] == "there", "the rank waited no longer than its user said"


def on_processes_that_hold_what_was_let_go(rank: int, folder: str, algorithm: str) -> tuple[str, list[bool]]:
    os.environ["FUNCTIONAL_PARALLEL_ALGORITHM"] = algorithm
    run = Training()
    run.step()
    groups = [weakref.ref(group) for group in distributed_c10d._world.pg_map]
    dist.destroy_process_group()
    found = outcome(run.params)[0], [group() is None for group in groups]
    init_again(rank, folder, "again")
    return found


@pytest.mark.parametrize("algorithm", ["auto", "backend"])
def test_groups_that_are_let_go_do_not_live_on(algorithm: str, tmp_path: Path) -> None:
    """Their threads outlived the interpreter, and one that then freed a tensor ended the process with SIGABRT."""
    for told, gone in run_on_processes(on_processes_that_hold_what_was_let_go, 2, str(tmp_path), algorithm):
        assert told == "CollectiveError" and len(gone) == 3 and all(gone), "all ranks, the mesh's, and its meetings'"


# -----------------------------------------------------------------------------
# Forked processes
# -----------------------------------------------------------------------------


def on_ranks_that_fork(rank: int) -> dict[str, Any]:
    run = Training()
    run.step()
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            told = outcome(run.step)
            os.write(writing, f"{told[0]}: {told[1]}".encode())
        finally:
            os._exit(0)
    os.wait()
    return {"child": os.read(reading, 10_000).decode(), "losses": [run.step(), run.step()]}


def test_a_forked_process_is_no_rank() -> None:
    alone = fp.train_step(loss, fp.optim.sgd(0.01, momentum=0.5), Mesh(data=1), fp.zero(3, "data"))
    state, wanted = alone.init(W), []
    for _ in range(3):
        state, metrics = alone(state, X)
        wanted.append(float(metrics.loss))
    for found in run_on_processes(on_ranks_that_fork, 2):
        assert found["child"].startswith("CollectiveError: process ") and "was forked from process" in found["child"]
        assert found["losses"] == pytest.approx(wanted[1:])


def on_a_rank_that_leaves_a_child_behind(rank: int, folder: str) -> tuple[str, str, float]:
    use_runtime(ProcessRuntime(MESH, timeout=20))
    run, done = Training(), Path(folder) / "done"
    run.step()
    if rank == 1:
        if os.fork() == 0:
            wait_for(done)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    told = outcome(run.step)
    done.touch()
    return told


def test_a_rank_that_dies_is_noticed_though_its_child_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child held the rank's ends of the connections, so that the others waited until their timeout."""
    monkeypatch.setenv("FUNCTIONAL_PARALLEL_ALGORITHM", "shared")  # torch's connections are the child's too
    told, exit_code = run_on_processes(on_a_rank_that_leaves_a_child_behind, 2, str(tmp_path), deaths=True)
    assert exit_code == -signal.SIGKILL
    assert told[0] == "CollectiveError" and "rank 1 (data=1) died" in told[1], told


# -----------------------------------------------------------------------------
# Threads and signals
# -----------------------------------------------------------------------------


def on_two_threads(rank: int) -> list[tuple[str, str, float]]:
    run, other = Training(), Training()
    run.step()
    other.step()
    under_way, refused = threading.Event(), threading.Event()

    def wait() -> None:
        under_way.set()
        refused.wait(FOREVER)

    inside.append(wait)
    found: list[tuple[str, str, float]] = []
    thread = threading.Thread(target=lambda: found.append(outcome(other.step)), name="second")
    thread.start()
    under_way.wait(FOREVER)
    found += [outcome(run.step), outcome(run.params)]
    refused.set()
    thread.join()
    return [*found, outcome(run.step)]


def test_calls_of_two_threads_that_overlap() -> None:
    """They took each other's signals: an error about `poll`, or threads that waited for each other."""
    for first, second, through, later in run_on_processes(on_two_threads, 2):
        assert through[0] == "nothing", "the call that was under way ends"
        for kind, message, _ in (first, second, later):
            assert (
                kind == "ReentrantCallError" and "'MainThread' began a call while thread 'second' was in one" in message
            )


def on_a_signal(rank: int) -> list[tuple[str, str, float]]:
    run = Training()
    run.step()
    kept = run.train.copy(run.state)
    signal.signal(signal.SIGUSR1, lambda *_: run.train.params(kept))
    inside.append(lambda: signal.raise_signal(signal.SIGUSR1))
    broken_off = outcome(run.step)
    with pytest.raises(DonatedStateError, match=r"to a step that failed \(CallMismatchError: a call began before"):
        run.step()
    return [broken_off, outcome(lambda: run.train.params(kept))]


def test_a_call_in_a_signals_handler() -> None:
    for broken_off, later in run_on_processes(on_a_signal, 2):
        assert (broken_off[0], later[0]) == ("CallMismatchError", "ReentrantCallError")
        assert "Let the handler set a flag" in broken_off[1] and "Let the handler set a flag" in later[1]
