"""Folders of runs: a second run, a full disk, a lost rank, hosts that do not share them; and saving in a loop."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.checkpoint import saving
from functional_parallel.checkpoint.disk import Disk
from functional_parallel.errors import CheckpointError

from ..processes import run_on_processes
from .small import PARAMS, small_step


@pytest.fixture(scope="module")
def train() -> Any:
    return small_step(reduction="ordered")


def steps(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if each.name != ".lock")


_OTHER = """
import sys, time, pathlib
from functional_parallel.checkpoint.disk import Disk
from functional_parallel.checkpoint.folder import RunFolder
RunFolder.of(Disk(), pathlib.Path(sys.argv[1]), "other")
print("ready", flush=True)
time.sleep(100)
"""


def test_a_second_run_is_refused_until_the_first_ends(train: Any, tmp_path: Path) -> None:
    state = train.init(PARAMS)
    with subprocess.Popen([sys.executable, "-c", _OTHER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        with pytest.raises(CheckpointError, match=rf"another run writes checkpoints here .process {other.pid} on"):
            train.save(state, tmp_path)
        state, _ = train(state, torch.ones(2, 4))  # training goes on
        other.kill()
        other.wait()
    train.save(state, tmp_path)
    assert steps(tmp_path) == ["step_00000001"]


def test_a_run_that_lost_its_folder_does_not_commit(train: Any, tmp_path: Path) -> None:
    train.save(train.init(PARAMS), tmp_path)
    (tmp_path / ".lock").write_text("process 1 on elsewhere, run other")  # where locks do not work
    with pytest.raises(CheckpointError, match=r"another run .process 1 on elsewhere"):
        train.save(train.init(PARAMS), tmp_path)


def test_a_folder_that_was_removed_is_made_again(train: Any, tmp_path: Path) -> None:
    for _ in range(2):
        train.save(train.init(PARAMS), tmp_path / "run")
        shutil.rmtree(tmp_path / "run")


class _Full(Disk):
    """A disk with room for small files only."""

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        if b"saved_offsets" in bytes(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # one of a descriptor does not name its file
        super().write(descriptor, data, offset)


def _written(folder: Path) -> int:
    return sum(each.stat().st_blocks * 512 for each in folder.glob("*.tmp-*/*/*"))


def test_a_full_disk_is_an_error_and_leaves_nothing(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = train.init(PARAMS)
    train.save(state, tmp_path)
    monkeypatch.setattr(saving, "Disk", _Full)
    state, _ = train(state, torch.ones(2, 4))
    need, free = 2 * sum(leaf.nbytes for leaf in PARAMS.values()) + 4, 10**9  # with moments, and a count
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": free - _written(path)}))
    with pytest.raises(CheckpointError) as caught:
        train.save(state, tmp_path)
    file = r"step_00000001.tmp-\w+/\w+/shard-00001-model-00001-of-00001.safetensors"
    numbers = f"The checkpoint needs {need} bytes in {tmp_path}, and {free:,} were free before it"
    assert re.fullmatch(f"{tmp_path}/{file}: No space left on device. {numbers}", str(caught.value))
    assert steps(tmp_path) == ["step_00000000"]
    monkeypatch.undo()
    train.save(state, tmp_path)
    assert steps(tmp_path) == ["step_00000000", "step_00000001"]


def test_a_folder_that_cannot_be_made_is_an_error(train: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        train.save(train.init(PARAMS), tmp_path / "file")


def test_no_checkpoint(train: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint; no such folder"):
        train.restore(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="no step has been committed there"):
        train.restore(tmp_path)
    train.save(train.init(PARAMS), tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; it has steps 0"):
        train.restore(tmp_path, step=7)


def a_rank_fails(rank: int, folder: str) -> list[str]:
    train, found = small_step(reduction="ordered"), []
    state = train.init(PARAMS)
    if rank:
        saving.Disk = _Full  # type: ignore[misc]
    try:
        train.save(state, folder)
    except CheckpointError as error:
        found.append(str(error))
    saver = fp.checkpoint.Saver(folder)
    saver(train, state)
    saving.Disk = Disk  # type: ignore[misc]
    state, _ = train(state, torch.ones(2, 4))
    try:
        saver(train, state)
    except CheckpointError as error:
        found.append(str(error))
    saver(train, state)
    saver.wait()
    return [*found, *steps(Path(folder))]


def test_a_rank_that_cannot_write_is_reported_on_all(tmp_path: Path) -> None:
    first, second = run_on_processes(a_rank_fails, 2, str(tmp_path))
    assert first == second and len(first) == 3
    assert "rank 1: " in first[0] and "shard-00002" in first[0] and "No space left" in first[1]
    assert first[2] == "step_00000001"


def not_shared(rank: int, folder: str) -> str:
    train = small_step(reduction="ordered")
    with pytest.raises(CheckpointError) as caught:
        train.save(train.init(PARAMS), Path(folder) / str(rank))
    return str(caught.value)


def test_hosts_that_do_not_share_the_folder(tmp_path: Path) -> None:
    for message in run_on_processes(not_shared, 2, str(tmp_path)):
        assert "rank 1: " in message and "must be shared by all hosts" in message


class _Slow(Disk):
    def sync(self, descriptor: int) -> None:
        time.sleep(0.3)
        super().sync(descriptor)


def test_a_saver_skips_or_waits(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "Disk", _Slow)
    for busy, expected in (("skip", [True, False, False]), ("wait", [True, True, True])):
        state, folder = train.init(PARAMS), tmp_path / busy
        with fp.checkpoint.Saver(folder, busy=busy, keep=2) as saver:
            saved = []
            for _ in range(3):
                state, _ = train(state, torch.ones(2, 4))
                saved.append(saver(train, state))
        assert saved == expected
        assert steps(folder) == (["step_00000001"] if busy == "skip" else ["step_00000002", "step_00000003"])
        restored = train.restore(folder)
        assert restored.step == (1 if busy == "skip" else 3)


def test_an_asynchronous_save_has_the_values_of_its_step(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "Disk", _Slow)
    state = train.init(PARAMS)
    with fp.checkpoint.Saver(tmp_path) as saver:
        saver(train, state)
        for _ in range(3):
            state, _ = train(state, torch.ones(2, 4))  # donated
    assert torch.equal(train.params(train.restore(tmp_path))["w"], PARAMS["w"])


def test_arguments(train: Any, tmp_path: Path) -> None:
    state = train.init(PARAMS)
    with pytest.raises(ValueError, match=r"every=0"):
        fp.checkpoint.Saver(tmp_path, every=0)
    with pytest.raises(ValueError, match="busy='never'"):
        fp.checkpoint.Saver(tmp_path, busy="never")
    with pytest.raises(TypeError, match=r"extra=.* a checkpoint has what JSON can hold"):
        train.save(state, tmp_path, extra={"x": torch.ones(1)})
    with pytest.raises(TypeError, match=r"give the fp.Position"):
        train.save(state, tmp_path, data=3)


def without_a_store(rank: int, folder: str) -> list[str]:
    from functional_parallel.runtime import ProcessRuntime

    ProcessRuntime.store = property(lambda self: None)  # type: ignore[assignment,method-assign]
    train = small_step(reduction="ordered")
    state = train.init(PARAMS)
    train.save(state, folder)
    with fp.checkpoint.Saver(folder) as saver:
        saver(train, train(state, torch.ones(2, 4))[0])
    return [str(train.restore(folder).step), *steps(Path(folder))]


def test_ranks_without_a_store_report_through_a_file(tmp_path: Path) -> None:
    """As with MPI."""
    for found in run_on_processes(without_a_store, 2, str(tmp_path)):
        assert found[0] == "1" and {"step_00000000", "step_00000001"} <= set(found)
