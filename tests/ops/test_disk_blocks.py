"""Blocks on disk keep what is written, and a failing disk is an error, not the end of the process."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from functional_parallel import errors
from functional_parallel.ops import disk_blocks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64)


@given(data=st.data(), shape=st.lists(st.integers(0, 5), max_size=3), dtype=st.sampled_from(DTYPES))
def test_what_is_written_is_read(
    data: st.DataObject, shape: list[int], dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("disk")
    x = torch.randint(-3, 4, shape).to(dtype)
    block = disk_blocks.empty_on_disk(shape, dtype, str(folder))
    disk_blocks.write(block, x)
    assert disk_blocks.is_on_disk(block) == bool(x.numel())
    assert torch.equal(disk_blocks.read(block, torch.empty_like(x)), x)
    assert torch.equal(block, x)  # a tensor like another one
    if x.ndim and x.shape[0]:
        start = data.draw(st.integers(0, x.shape[0] - 1))
        disk_blocks.write(block[start:], x[start:] * 0)
        assert torch.equal(disk_blocks.read(block[start:], torch.empty_like(x[start:])), x[start:] * 0)
        assert torch.equal(block[:start], x[:start])
    assert not list(folder.iterdir())


def open_files(folder: Path) -> int:
    links = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
    return sum(str(folder) in os.readlink(link) for link in links if link.is_symlink())


def test_a_block_ends_with_its_last_tensor(tmp_path: Path) -> None:
    block = disk_blocks.empty_on_disk([4], torch.float32, str(tmp_path))
    view = block[2:]
    del block
    gc.collect()
    assert disk_blocks.is_on_disk(view)
    assert open_files(tmp_path) == 1
    del view
    gc.collect()
    assert not open_files(tmp_path)


def test_blocks_are_no_anonymous_memory(tmp_path: Path) -> None:
    """A process with a limit of its data keeps more than the limit on disk, and changes it piece by piece."""
    script = f"""
        import resource, torch
        from functional_parallel.ops import disk_blocks
        torch.set_num_threads(1)
        used = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) << 10
        resource.setrlimit(resource.RLIMIT_DATA, (used + (32 << 20),) * 2)
        blocks = [disk_blocks.empty_on_disk([4 << 20], torch.float32, {str(tmp_path)!r}) for _ in range(8)]
        part = torch.empty(1 << 20)
        for block in blocks:
            for piece in block.split(1 << 20):
                disk_blocks.write(piece, disk_blocks.read(piece, part).add_(1))
        pieces = [piece for block in blocks for piece in block.split(1 << 20)]
        assert all(float(disk_blocks.read(piece, part).sum()) == 1 << 20 for piece in pieces)
        try:
            kept = [torch.ones(4 << 20) for _ in range(8)]
        except RuntimeError as error:
            print("too large")
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "too large\n", result.stderr


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    script = f"""
        import os, torch
        from functional_parallel.ops import disk_blocks
        block = disk_blocks.write(disk_blocks.empty_on_disk([1024], torch.float32, {str(tmp_path)!r}), torch.ones(1024))
        os.kill(os.getpid(), 9)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=120)
    assert result.returncode == -signal.SIGKILL
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(errors.DiskError, match=r"gone: no block of 16 B can be made .*No such file"):
        disk_blocks.empty_on_disk([4], torch.float32, str(tmp_path / "gone"))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(errors.DiskError, match=r"no block of 16 B can be made in this folder \(.* free\).*No space"):
        disk_blocks.empty_on_disk([4], torch.float32, str(tmp_path))
    assert not open_files(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_a_disk_that_fails(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = disk_blocks.empty_on_disk([4], torch.float32, str(tmp_path))

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(errors.DiskError, match=r"16 B of a tensor on this disk could not be .*Input/output error"):
        (disk_blocks.read if call == "preadv" else disk_blocks.write)(block, torch.ones(4))


def test_calls_that_move_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call may move fewer bytes than it was given."""
    monkeypatch.setattr(disk_blocks, "_MOST", 3)
    x = torch.arange(5.0)
    block = disk_blocks.write(disk_blocks.empty_on_disk([5], torch.float32, str(tmp_path)), x)
    assert torch.equal(disk_blocks.read(block, torch.empty(5)), x)
