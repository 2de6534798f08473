"""Runs that are killed at any time resume without help, and end with the bits of the undisturbed run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.checkpoint.folder import committed
from sharding_specs import Mesh

from ..processes import run_on_processes

ROOT = Path(__file__).parents[2]
SAMPLES = torch.randn(40, 6, generator=torch.Generator().manual_seed(2))


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ p["w"]) @ p["v"]).square().mean()


def params() -> Any:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(6, 300, generator=generator), "v": torch.randn(300, 3, generator=generator)}


def step_of(ranks: int) -> Any:
    plan, options = fp.zero(3, "data"), {"reduction": "ordered", "seed": 3, "batch": "own"}
    return fp.train_step(loss, fp.optim.adamw(0.01), Mesh(data=ranks), plan, **options)  # type: ignore[arg-type]


def train_until(ranks: int, folder: Path | None, last: int, began: threading.Event | None = None) -> Any:
    """Train to a step, from the newest checkpoint of a folder if there is one; save after each second step."""
    train, start = step_of(ranks), fp.Position()
    sampler = fp.Sampler(40, batch=8, mesh=Mesh(data=ranks), seed=1)
    if folder is not None and folder.is_dir() and committed(folder):
        state, start = train.restore(folder), fp.checkpoint.inspect(folder).data_position
    else:
        state = train.init(params())
    saver = None if folder is None else fp.checkpoint.Saver(folder, every=2, keep=2)
    for position, samples in sampler.run(start=start):
        if state.step >= last:
            break
        state, _ = train(state, SAMPLES[samples])
        if saver is not None:
            saver(train, state, data=position)
        if began is not None:
            began.set()
    if saver is not None:
        saver.wait()
    return train.params(state)


def a_rank(rank: int, ranks: int, folder: str, last: int, end: float | None, early: bool = False) -> Any:
    """Train, and be killed some seconds after the first step, or after the start of the process."""
    began = threading.Event()
    if end is not None:

        def kill() -> None:
            if not early:
                began.wait(60)
            time.sleep(end + random.Random(os.getpid()).uniform(0, 0.02))
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=kill, daemon=True).start()
    try:
        return train_until(ranks, Path(folder), last, began)
    except Exception:
        if end is None:
            raise
        time.sleep(100)  # a peer died first; this rank's time comes too
        return None


def kills(ranks: int, count: int, folder: Path, seed: int) -> None:
    chance, newest = random.Random(seed), -1
    for _ in range(count):
        ends, early = chance.uniform(0.0, 0.6), chance.random() < 0.2
        run_on_processes(a_rank, ranks, ranks, str(folder), 10**6, ends, early, deaths=True)
        if folder.is_dir() and committed(folder):
            found = fp.checkpoint.inspect(folder)
            found.verify()
            assert found.step >= newest, "a committed checkpoint is lost"
            newest = found.step
    last = max(newest, 0) + 5
    expected = train_until(ranks, None, last)
    for got in run_on_processes(a_rank, ranks, ranks, str(folder), last, None):
        assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert newest > 0


def test_three_kills(tmp_path: Path) -> None:
    kills(2, 3, tmp_path / "run", seed=0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "seed"), [(2, 1), (2, 2), (2, 3), (4, 4), (4, 5)])
def test_kills(ranks: int, seed: int, tmp_path: Path) -> None:
    kills(ranks, 36, tmp_path / "run", seed)


_SCRIPT = """
import os, signal, sys, threading, time
from pathlib import Path
import torch
from tests.checkpoint.test_kills import train_until
import functional_parallel as fp

times = list(map(float, sys.argv[2:]))
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt < len(times) and fp.rank() == attempt % 2:
    def kill():
        time.sleep(times[attempt])
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=kill, daemon=True).start()
folder, last = Path(sys.argv[1]), 10**6
if attempt == len(times):
    last = fp.checkpoint.inspect(folder).step + 5
found = train_until(2, folder, last)
if fp.rank() == 0:
    torch.save((last, found), folder / "end.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1])
def test_torchrun_restarts_are_enough(seed: int, tmp_path: Path) -> None:
    chance, script, folder = random.Random(seed), tmp_path / "script.py", tmp_path / "run"
    script.write_text(_SCRIPT)
    times = [str(chance.uniform(2, 6)) for _ in range(10)]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "10"]
    done = subprocess.run(
        [*command, "--master-port", str(29600 + seed), str(script), str(folder), *times],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    last, got = torch.load(folder / "end.pt")
    expected = train_until(2, None, last)
    assert all(torch.equal(got[key], expected[key]) for key in expected)
