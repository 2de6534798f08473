"""A ResNet script for DDP and its port: the same losses, and the same bits after a kill."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

import functional_parallel as fp

from .scripts import ROOT, changed_lines, printed, started

ORIGINAL, PORTED = ROOT / "examples" / "ddp_resnet.py", ROOT / "examples" / "prepared_resnet.py"


def losses(lines: list[str]) -> list[float]:
    return [float(line.split()[2]) for line in lines if " loss " in line]


def test_the_port_has_the_losses_of_the_original(tmp_path: Path) -> None:
    assert len(ORIGINAL.read_text().splitlines()) >= 100 and changed_lines(ORIGINAL, PORTED) <= 15
    wanted = printed(ORIGINAL, "--epochs", 1, "--folder", tmp_path / "original")
    found = printed(PORTED, "--epochs", 1, "--folder", tmp_path / "ported")
    assert len(losses(found)) == 8
    torch.testing.assert_close(losses(found), losses(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_synchronised_statistics_are_those_of_one_rank_with_all_samples(tmp_path: Path) -> None:
    """On CPUs torch has no synchronised batch norm, so the original runs on one rank. Later epochs amplify rounding."""
    wanted = printed(ORIGINAL, "--folder", tmp_path / "original", "--batch", 32, "--epochs", 1, ranks=1)
    found = printed(PORTED, "--folder", tmp_path / "ported", "--sync", "--epochs", 1)
    torch.testing.assert_close(losses(found), losses(wanted), rtol=1e-5, atol=1e-6)
    assert [line for line in found if " right " in line] == [line for line in wanted if " right " in line]


@pytest.mark.slow
def test_a_killed_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    whole = printed(PORTED, "--folder", tmp_path / "whole", "--epochs", 4)
    folder = tmp_path / "killed"
    running = started(PORTED, "--folder", folder, "--epochs", 4)
    while not any(folder.glob("step_*8/*")):
        assert running.poll() is None
        time.sleep(0.01)
    time.sleep(0.3)  # in a later epoch
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    first = fp.checkpoint.inspect(folder).step
    assert 0 < first < 32
    resumed = printed(PORTED, "--folder", folder, "--epochs", 4, "--resume")
    assert resumed == whole[-len(resumed) :] and len(losses(resumed)) == 32 - first
    ends = [fp.checkpoint.inspect(tmp_path / name) for name in ("whole", "killed")]
    assert ends[0].leaves == ends[1].leaves and "optimizer/~Buffers/stem.1.running_mean" in ends[0].leaves
    assert all(torch.equal(ends[0].tensor(name), ends[1].tensor(name)) for name in ends[0].leaves)
