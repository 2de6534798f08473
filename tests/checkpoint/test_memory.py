"""Memory of saving and restoring: a rank's own shards and one box, never the full model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..processes import run_on_processes

MIB, SLACK = 2**20, 16  # MiB: blocks of files, and what Python keeps
LEAVES, ROWS, COLUMNS = 10, 1024, 2048  # 8 MiB each
OWN = LEAVES * 8 * 3 // 2  # MiB of a rank: half of parameters and moments
BOX, WHOLE = 4, LEAVES * 8 * 3


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return sum((x @ leaf[:, :2]).square().mean() for leaf in p.values())  # type: ignore[no-any-return]


def make() -> dict[str, torch.Tensor]:
    return {f"w{index}": torch.full((ROWS, COLUMNS), float(index)) for index in range(LEAVES)}


def peak_of(run: Any) -> float:
    """MiB that a call adds to the resident memory of this process at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    run()
    return (_status("VmHWM") - before) / 1024


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


def on_a_rank(rank: int, folder: str) -> tuple[float, float, float, float]:
    path, options = Path(folder), {"reduction": "ordered"}
    rows = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), fp.zero(3, "data"), **options)
    columns = fp.tensor_parallel("data", {"*": P(None, "data")})
    other = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), columns, **options)
    small = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=2), columns, **options)
    few = {"w0": torch.ones(4, 4)}
    small.save(small.init(few), path / "few")  # what the first save and restore import
    small.restore(path / "few")
    state = rows.init(make)
    saved = peak_of(lambda: rows.save(state, path / "run"))
    found = []
    read = peak_of(lambda: found.append(other.restore(path / "run")))
    split = peak_of(lambda: other.save(found[0], path / "other"))
    # Last, since memory that it releases would be used again unseen.
    saver = fp.checkpoint.Saver(path / "later")
    copied = peak_of(lambda: saver(rows, state))
    saver.wait()
    assert torch.equal(other.params(found[0])["w3"][:2, :2], torch.full((2, 2), 3.0))
    return saved, copied, read, split


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the peak of a process")
def test_no_rank_holds_the_full_model(tmp_path: Path) -> None:
    for saved, copied, read, split in run_on_processes(on_a_rank, 2, str(tmp_path)):
        assert saved <= BOX + SLACK
        assert split <= BOX + SLACK
        assert OWN - SLACK <= copied <= OWN + BOX + SLACK
        assert OWN - SLACK <= read <= OWN + BOX + SLACK < WHOLE
