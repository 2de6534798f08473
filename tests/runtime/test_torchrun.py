"""The same script under `python` and under `torchrun` prints the same losses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "training.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def output_of(*command: str) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    command = (sys.executable, *command, str(SCRIPT))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def losses_in(lines: list[str]) -> list[float]:
    return [float(line.split()[1]) for line in lines if line.startswith("loss ")]


def test_losses_are_the_same_and_printed_once() -> None:
    simulated, real = losses_in(output_of()), losses_in(launched := output_of(*TORCHRUN))
    assert len(simulated) == len(real) == 5 and len(set(simulated)) == 5
    for a, b in zip(simulated, real, strict=True):
        assert abs(a - b) <= 1e-12 * a
    assert launched.count("groups at the end: False") == 4
