"""Ranks that are killed at random moments: the others end within 30 s, and name the rank that died.

`pytest -m slow tests/runtime/test_kills.py -s` makes 100 kills, 10 of them under torchrun, and prints their table.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import functional_parallel as fp
from sharding_specs import Mesh, P
from tests.processes import _server, connect, free_port, run_on_processes

LIMIT = 30.0
START_TIMEOUT = 12.0
PHASES = ("start-up", "first step", "later steps")
X = torch.arange(32, dtype=torch.float64).reshape(8, 4) % 5


# -----------------------------------------------------------------------------
# The program that is killed
# -----------------------------------------------------------------------------


class Case(NamedTuple):
    """A training run.

    Attributes:
        mesh: of how many ranks.
        plan: the name of a plan.
        algorithm: how collectives travel.
        by_script: whether the script makes the process group, rather than the library.
    """

    mesh: str
    plan: str
    algorithm: str
    by_script: bool = False


CASES = [
    *(Case("data=2", "zero", name) for name in ("auto", "backend", "shared")),
    Case("data=2", "zero", "backend", by_script=True),
    Case("pipe=2", "pipeline", "auto"),
    Case("pipe=2", "pipeline", "backend"),
    Case("data=2,tensor=2", "both", "auto"),
    Case("data=2,tensor=2", "both", "backend", by_script=True),
    Case("data=2,tensor=2", "both", "backend"),
]


def plan_of(name: str) -> Any:
    if name == "pipeline":
        return fp.pipeline("pipe", schedule="1f1b", microbatches=2)
    zero = fp.zero(3, "data")
    if name == "zero":
        return zero
    return fp.chain(fp.tensor_parallel("tensor", {"layers/0": P(None, "tensor"), "layers/1": P("tensor")}), zero)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    for w in params["layers"]:
        x = torch.tanh(x @ w)
    return (x**2).mean()


def train(case: Case, folder: Path) -> None:
    """Take steps for ever, and note in a file which step has begun."""
    progress = (folder / f"progress-{os.environ['RANK']}").open("a", buffering=1)
    print(f"process {os.getpid()}", file=progress)
    if case.by_script:
        connect(60)
    mesh = Mesh.parse(case.mesh)
    step = fp.train_step(loss, fp.optim.adamw(0.1), mesh, plan_of(case.plan))
    state = step.init({"layers": [torch.eye(4, dtype=torch.float64) for _ in range(2)]})
    number = 0
    while True:
        print(f"step {number}", file=progress)
        state, _ = step(state, X)
        number += 1


def on_rank(rank: int, environment: dict[str, str], case: Case, folder: str) -> None:
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), LOCAL_RANK=str(rank))
    os.dup2(os.open(f"{folder}/errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    train(case, Path(folder))


# -----------------------------------------------------------------------------
# One kill
# -----------------------------------------------------------------------------


class Kill(NamedTuple):
    """A rank that was killed, and the end of the others.

    Attributes:
        phase: where the run was.
        seconds: until the last of the others ended, from the kill on.
        faults: of the others.
    """

    phase: str
    seconds: float
    faults: list[str]


def kill_one(case: Case, phase: str, draw: random.Random, folder: Path) -> Kill:
    """Start a run, kill one of its ranks in a phase, and watch the others end."""
    size = Mesh.parse(case.mesh).size
    victim, context = draw.randrange(size), multiprocessing.get_context("forkserver")
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "FUNCTIONAL_PARALLEL_ALGORITHM": case.algorithm,
        "FUNCTIONAL_PARALLEL_START_TIMEOUT": str(START_TIMEOUT),
    }
    ranks = [
        context.Process(target=on_rank, args=(rank, environment, case, str(folder)), daemon=True)
        for rank in range(size)
    ]
    try:
        for rank, process in enumerate(ranks):
            with patch.object(forkserver, "connect_to_new_process", _server(rank).connect_to_new_process):
                process.start()
        wait_for(phase, folder / f"progress-{victim}", draw, ranks)
        reached = phase_of(folder / f"progress-{victim}")
        began = time.monotonic()
        ranks[victim].kill()
        others = [(rank, process) for rank, process in enumerate(ranks) if rank != victim]
        for _, process in others:
            process.join(max(0.0, began + LIMIT - time.monotonic()))
        seconds = time.monotonic() - began
        faults = [fault for rank, process in others if (fault := fault_of(rank, process, victim, folder))]
        return Kill(reached, seconds, faults + left_behind([process.pid for process in ranks]))
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def wait_for(phase: str, progress: Path, draw: random.Random, ranks: list[Any]) -> None:
    """Wait for a random moment of a phase of one rank."""
    mark = {"start-up": "process", "first step": "step 0", "later steps": f"step {draw.randint(1, 9)}\n"}[phase]
    deadline = time.monotonic() + 60
    while phase != "start-up" and mark not in text_of(progress):
        ended = [rank for rank, process in enumerate(ranks) if not process.is_alive()]
        assert not ended and time.monotonic() < deadline, f"ranks {ended} ended by themselves"
        time.sleep(0.001)
    time.sleep(draw.random() * {"start-up": 0.6, "first step": 0.3, "later steps": 0.02}[phase])


def phase_of(progress: Path) -> str:
    text = text_of(progress)
    return PHASES[2] if "step 1\n" in text else PHASES[1] if "step 0" in text else PHASES[0]


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def fault_of(rank: int, process: Any, victim: int, folder: Path) -> str | None:
    """Return what is wrong with the end of a rank that was not killed."""
    errors = text_of(folder / f"errors-{rank}")
    if process.is_alive():
        return f"rank {rank} hangs, {errors[-2000:]}"
    last = [line for line in errors.splitlines() if re.match(r"[\w.]*(CollectiveError|CallMismatchError): ", line)][-1:]
    if process.exitcode == 0 or not last or not re.search(rf"rank {victim} \(", last[0]):
        return f"rank {rank} ended with {process.exitcode} and does not name rank {victim}: {errors[-2000:]}"
    return None


def left_behind(processes: list[int | None]) -> list[str]:
    """Return what these processes left in shared memory."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    ours = [name for name in names if "functional_parallel" in name or any(f"_{pid}_" in name for pid in processes)]
    return [f"left in shared memory: {name}" for name in ours]


# -----------------------------------------------------------------------------
# Under torchrun
# -----------------------------------------------------------------------------


def kill_under_torchrun(phase: str, draw: random.Random, folder: Path) -> Kill:
    """Kill a worker of torchrun, which then ends the others by itself."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    victim, progress = draw.randrange(2), folder / "progress-0"
    with (folder / "errors").open("w") as errors:
        run = subprocess.Popen([*command, str(folder)], env=environment, stderr=errors, stdout=errors)
    try:
        progress = folder / f"progress-{victim}"
        while "process" not in text_of(progress):
            assert run.poll() is None, text_of(folder / "errors")
            time.sleep(0.01)
        wait_for(phase, progress, draw, [])
        reached, began = phase_of(progress), time.monotonic()
        os.kill(int(text_of(progress).split()[1]), signal.SIGKILL)
        faults = []
        try:
            run.wait(LIMIT)
        except subprocess.TimeoutExpired:
            faults = ["torchrun hangs"]
        seconds, text = time.monotonic() - began, text_of(folder / "errors")
        if not re.search(rf"rank\s*: {victim} |rank {victim} \(", text):
            faults.append(f"rank {victim} is not named: {text[-2000:]}")
        return Kill(f"torchrun, {reached}", seconds, faults + left_behind([run.pid]))
    finally:
        run.kill()
        run.wait()


# -----------------------------------------------------------------------------
# Laws
# -----------------------------------------------------------------------------


def nothing(rank: int) -> None:
    """Let the process that ranks are forked from import torch, which may take longer than a start may."""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    run_on_processes(nothing, max(Mesh.parse(case.mesh).size for case in CASES))


@pytest.mark.parametrize(("case", "phase"), [(CASES[0], 0), (CASES[1], 1), (CASES[2], 2), (CASES[4], 2)])
def test_the_others_end_and_name_the_rank_that_was_killed(case: Case, phase: int, tmp_path: Path) -> None:
    kill = kill_one(case, PHASES[phase], random.Random(phase), tmp_path)
    assert not kill.faults and kill.seconds < LIMIT, kill


@pytest.mark.slow
def test_a_hundred_kills(tmp_path: Path) -> None:
    seed = int(os.environ.get("KILLS_SEED", "0")) or random.randrange(1, 1 << 30)
    count = int(os.environ.get("KILLS", "100"))
    draw, kills = random.Random(seed), []
    for number in range(count):
        folder, phase = tmp_path / str(number), PHASES[number % 3]
        folder.mkdir()
        if number % 10 == 9:
            kills.append(kill_under_torchrun(phase, draw, folder))
        else:
            cases = [each for each in CASES if not (each.by_script and phase == "start-up")]  # torch's own waits
            kills.append(kill_one(draw.choice(cases), phase, draw, folder))
        for fault in kills[-1].faults:
            print(f"kill {number}, {kills[-1].phase}: {fault}", flush=True)
    print(f"\n{table(kills)}\nseed {seed}")
    assert not any(kill.faults for kill in kills)


def table(kills: list[Kill]) -> str:
    rows = [f"{'phase of the rank that was killed':34} {'kills':>6} {'faults':>7} {'median s':>9} {'longest s':>10}"]
    for phase in [*sorted({kill.phase for kill in kills}), "all"]:
        of_phase = [kill for kill in kills if phase in (kill.phase, "all")]
        seconds = sorted(kill.seconds for kill in of_phase)
        faults = sum(bool(kill.faults) for kill in of_phase)
        numbers = f"{len(of_phase):6} {faults:7} {seconds[len(seconds) // 2]:9.1f} {seconds[-1]:10.1f}"
        rows.append(f"{phase:34} {numbers}")
    return "\n".join(rows)


if __name__ == "__main__":  # a rank of torchrun
    assert dist.is_available()
    train(CASES[0], Path(sys.argv[1]))
