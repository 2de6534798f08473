"""The same script under Ray's TorchTrainer, on a local Ray with two workers, prints the losses of simulated ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from . import training
from .test_torchrun import losses_in

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray: pip install functional-parallel[ray]")
def test_two_workers_print_the_losses_of_simulated_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Ray's print does not obey sys.stdout.
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "RAY_TRAIN_ENABLE_PRINT_PATCH": "0"}
    done = subprocess.run(
        (sys.executable, "-m", "tests.runtime.on_ray", str(tmp_path)),
        env={**os.environ, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    training.main(data=2, tensor=1)
    simulated = losses_in(capsys.readouterr().out.splitlines())
    printed = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1)]
    assert [lines[-1] for lines in printed] == ["rank 0 gloo", "rank 1 gloo"]
    assert len(losses_in(printed[0])) == len(simulated) == 5 and not losses_in(printed[1])
    for ours, theirs in zip(losses_in(printed[0]), simulated, strict=True):
        assert abs(ours - theirs) <= 1e-12 * theirs
