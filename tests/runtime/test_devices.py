"""`pytest --device cuda` takes the tests that start processes, all of them, and skips them where there is no device."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .. import devices

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests themselves would run")
def test_without_a_device_the_tests_on_processes_are_skipped() -> None:
    files = ("tests/test_errors.py", "tests/runtime/test_processes.py", "tests/collectives/test_processes.py")
    done = subprocess.run(
        (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device", "cuda", "-rs", *files),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    (counts,) = re.findall(r"(\d+) skipped, (\d+) deselected in", done.stdout)
    assert int(counts[0]) > 40 and int(counts[1]) > 10 and "no CUDA device" in done.stdout
    assert "mpi4py" not in done.stdout and "test_errors" not in done.stdout


@pytest.mark.parametrize("gpus, ranks, backend", [(1, 1, "nccl"), (1, 2, "gloo"), (4, 4, "nccl"), (0, 1, "gloo")])
def test_the_backend_of_ranks(gpus: int, ranks: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv(devices._VARIABLE, "cuda" if gpus else "")
    assert devices.backend_of_ranks(ranks) == backend
