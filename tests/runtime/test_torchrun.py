"""The same script prints the same losses by itself, where ranks are simulated, and under `torchrun`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import training

SCRIPT = Path(training.__file__)


def torchrun(ranks: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def output_of(*command: str) -> list[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run(
        (sys.executable, *command), env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def losses_in(lines: list[str]) -> list[float]:
    return [float(line.split()[1]) for line in lines if line.startswith("loss ")]


def assert_same(simulated: list[str], launched: list[str], ranks: int) -> None:
    expected, real = losses_in(simulated), losses_in(launched)
    assert len(expected) == len(real) == 5 and len(set(expected)) == 5
    for a, b in zip(expected, real, strict=True):
        assert abs(a - b) <= 1e-12 * a
    assert launched.count("groups at the end: False") == ranks


def test_losses_are_the_same_and_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Simulated in this process, which has imported everything already."""
    training.main(data=2, tensor=1)
    simulated = capsys.readouterr().out.splitlines()
    assert_same(simulated, output_of(*torchrun(2), str(SCRIPT), "2", "1"), 2)


@pytest.mark.slow
def test_four_ranks_print_what_a_process_of_its_own_prints() -> None:
    script = (str(SCRIPT), "2", "2")
    assert_same(output_of(*script), output_of(*torchrun(4), *script), 4)
