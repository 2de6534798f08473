"""Disks that are full, vanish, fail or are shared: a clear error, and a run that goes on from its checkpoint.

Where the machine allows it, a disk is a file system in memory that is mounted for one rank alone.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.runtime.processes import started_moves
from sharding_specs import Mesh, P

from ..passes.networks import batch, loss, parameters
from ..processes import RankError, run_on_processes

X, Y = batch(8)
ROOM = 64 << 10  # bytes of a mounted disk


def params() -> Any:
    return optree.tree_map(torch.Tensor.float, parameters(3))


def train_on(*offload: Any, **options: Any) -> Any:
    return fp.train_step(loss, fp.optim.adamw(1e-2), Mesh(data=2), fp.chain(fp.zero(2, "data"), *offload), **options)


def run(train: Any, state: Any, steps: int) -> Any:
    for _ in range(steps):
        state, _ = train(state, X.float(), Y)
    return state


def trained(train: Any, state: Any, steps: int) -> Any:
    return optree.tree_map(torch.clone, train.params(run(train, state, steps)))


def is_same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, optree.tree_leaves(a), optree.tree_leaves(b)))


def wanted(steps: int) -> Any:
    plain = train_on(reduction="ordered")
    return trained(plain, plain.init(params()), steps)


# --- disks of a rank's own ---


def mount(folder: Path) -> bool:
    """Mount a small disk for this process alone. Return whether it may."""
    own_mounts, private = 1 << 17, 1 << 14 | 1 << 18  # Linux: CLONE_NEWNS; MS_REC and MS_PRIVATE
    libc = ctypes.CDLL(None, use_errno=True)
    return not (
        libc.unshare(own_mounts)
        or libc.mount(b"none", b"/", None, private, None)
        or libc.mount(b"tmpfs", bytes(folder), b"tmpfs", 0, f"size={ROOM}".encode())
    )


def _on_a_full_disk(rank: int, mine: Path) -> Any:
    if not mount(mine):
        return None
    (mine / "of another").write_bytes(bytes(ROOM - 8192))
    try:
        train_on(fp.offload(state="disk", path=str(mine))).init(params())
    except fp.DiskError as error:
        message = str(error)
    gc.collect()  # the error holds what was made before it
    os.unlink(mine / "of another")
    return message, shutil.disk_usage(mine).free, trained(*_begun(mine), 2)


def _begun(folder: Path) -> tuple[Any, Any]:
    train = train_on(fp.offload(state="disk", path=str(folder)), reduction="ordered")
    return train, train.init(params())


@pytest.mark.slow
def test_a_full_disk_is_found_before_the_first_step(tmp_path: Path) -> None:
    """What was reserved until then is free again."""
    found = run_on_processes(_on_a_full_disk, 2, tmp_path)
    if None in found:
        pytest.skip("this process may not mount disks")
    for message, free, result in found:
        assert "can be made in this folder (" in message and "No space left" in message and "fp.offload(" in message
        assert free == ROOM and is_same(result, wanted(2))


def _on_a_disk_that_is_unmounted(rank: int, mine: Path) -> Any:
    if not mount(mine):
        return None
    train, state = _begun(mine)
    state = run(train, state, 1)
    assert not ctypes.CDLL(None).umount2(bytes(mine), 2)  # MNT_DETACH
    return trained(train, state, 2)


@pytest.mark.slow
def test_a_run_goes_on_when_its_disk_is_unmounted(tmp_path: Path) -> None:
    """Its files stay open."""
    found = run_on_processes(_on_a_disk_that_is_unmounted, 2, tmp_path)
    if None in found:
        pytest.skip("this process may not mount disks")
    assert all(is_same(result, wanted(3)) for result in found)


# --- a folder that vanishes, and a disk that fails ---


def test_a_run_goes_on_when_its_folder_is_deleted(tmp_path: Path) -> None:
    """Its files have no names. A checkpoint is written, from which another run goes on. A new state is refused."""
    (folder := tmp_path / "disk").mkdir()
    train, state = _begun(folder)
    state = run(train, state, 1)
    folder.rmdir()
    train.save(state, tmp_path / "checkpoint")
    assert is_same(trained(train, state, 2), wanted(3))
    plain = train_on(reduction="ordered")
    assert is_same(trained(plain, plain.restore(tmp_path / "checkpoint"), 2), wanted(3))
    with pytest.raises(fp.DiskError, match=r"disk: no block of .* can be made .*No such file"):
        train.restore(tmp_path / "checkpoint")


def test_activations_need_their_folder_in_each_step(tmp_path: Path) -> None:
    (folder := tmp_path / "disk").mkdir()
    train = train_on(fp.offload(activations="disk", path=str(folder), at_least=1), reduction="ordered")
    state = run(train, train.init(params()), 1)
    train.save(state, tmp_path / "checkpoint")
    folder.rmdir()
    with pytest.raises(fp.DiskError, match=r"disk: no block of .* can be made .*No such file"):
        run(train, state, 1)
    folder.mkdir()
    assert is_same(trained(train, train.restore(tmp_path / "checkpoint"), 2), wanted(3))


def _on_a_disk_that_fails(rank: int, folder: Path, fault: str) -> None:
    started_moves.LEAST = 0  # every move is in flight
    train, state = _begun(folder / "disk")
    state = run(train, state, 1)
    train.save(state, folder / "checkpoint")

    def failing(*_: object) -> int:
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, "Input/output error")

    if rank == 1:
        os.pwritev = failing  # type: ignore[assignment]
    run(train, state, 2)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fails", "of a tensor on this disk could not be written: .*Input/output error.* go on from the last"),
        pytest.param("killed", "rank 1", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost_when_a_disk_fails(fault: str, message: str, tmp_path: Path) -> None:
    """All ranks end, no file is left, and the checkpoint goes on in another folder and without a disk."""
    for name in ("disk", "other"):
        (tmp_path / name).mkdir()
    with pytest.raises(RankError, match=message):
        run_on_processes(_on_a_disk_that_fails, 2, tmp_path, fault, timeout=60.0)
    assert not list((tmp_path / "disk").iterdir())
    for offload in ([], [fp.offload(state="disk", path=str(tmp_path / "other"))]):
        train = train_on(*offload, reduction="ordered")
        assert is_same(trained(train, train.restore(tmp_path / "checkpoint"), 2), wanted(3))


# --- shared folders, and files of others ---


def test_runs_share_a_folder_with_each_other_and_with_files_of_others(tmp_path: Path) -> None:
    (stale := tmp_path / "tmp_of_an_earlier_run").write_text("stale")
    runs = [_begun(tmp_path) for _ in range(2)]
    states = [state for _, state in runs]
    for _ in range(2):
        states = [run(train, state, 1) for (train, _), state in zip(runs, states, strict=True)]
    results = [trained(train, state, 1) for (train, _), state in zip(runs, states, strict=True)]
    assert all(is_same(result, wanted(3)) for result in results)
    assert [*tmp_path.iterdir()] == [stale] and stale.read_text() == "stale"


# --- one op above the budget ---


def test_an_op_above_the_budget_is_named() -> None:
    """Its one operand is above the budget, whatever is moved."""

    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        small = torch.tanh(x)
        return small @ fp.to_memory(w, "device")

    large = torch.ones(64, 1024)
    step = fp.compile(f, Mesh(), in_specs=(P(memory="host"), P()), out_specs=P(), memory=fp.Memory(device=large.nbytes))
    line = r"of the memory 'device', .* above the budget, at mm \(test_faults_of_disks\.py:\d+\)\. .*Ways out: Memory"
    with pytest.raises(fp.BudgetError, match=line):
        step(large, torch.ones(2, 64))
    assert torch.equal(
        fp.compile(f, Mesh(), in_specs=(P(memory="host"), P()), out_specs=P())(large, torch.ones(2, 64)),
        torch.tanh(torch.ones(2, 64)) @ large,
    )
