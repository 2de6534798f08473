"""Boxes of files are read block by block, and no block is read that has none of their bytes."""

from __future__ import annotations

import errno
import math
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from functional_parallel.checkpoint import Copies, LeafLayout, Piece, files, plan_save, sums
from functional_parallel.checkpoint.disk import Disk
from functional_parallel.checkpoint.files import ShardFile, write_file
from functional_parallel.errors import DamagedCheckpointError
from sharding_specs import Box, Mesh, P

SMALL = 64  # bytes of a block here
UNKNOWN = 9999  # advice that no system knows, as an old one does not know that of the library


@settings(max_examples=40)
@given(data=st.data())
def test_any_box_of_any_tensor(data: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    sizes = tuple(data.draw(st.integers(1, size)) for size in shape)
    start = tuple(data.draw(st.integers(0, size - count)) for size, count in zip(shape, sizes, strict=True))
    dtype = data.draw(st.sampled_from([torch.float64, torch.int16]))
    full, box = torch.arange(math.prod(shape)).to(dtype).view(shape), Box(start, sizes)
    is_mapped = data.draw(st.booleans())
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "BLOCK", SMALL)
        patch.setattr(files, "BLOCK", SMALL)
        if not is_mapped:
            patch.setattr(files, "_POPULATE_READ", UNKNOWN)
        entries = [("first", torch.int16, Box((0,), (5,))), ("x", dtype, Box((0,) * len(shape), shape))]
        info = write_file(Disk(), path, entries, [torch.ones(5, dtype=torch.int16), full], "crc32")
        with ShardFile(path, info, "crc32") as file:
            read = read_blocks(file, patch)
            target = torch.zeros(sizes, dtype=dtype)
            file.read(file.entries["x"], box, target)
            assert torch.equal(target, full[box.slices])
            numbers = torch.arange(full.numel()).view(shape)[box.slices].flatten() * dtype.itemsize
            begin = file.entries["x"].begin
            needed = {(begin + int(n) + byte) // SMALL for n in numbers for byte in (0, dtype.itemsize - 1)}
            span = set(range(min(needed), max(needed) + 1))
            assert needed <= read <= span


def read_blocks(file: ShardFile, patch: pytest.MonkeyPatch) -> set[int]:
    """The blocks that are verified from now on."""
    found: set[int] = set()
    verify = file._verify

    def seen(number: int, data: memoryview) -> None:
        found.add(number)
        verify(number, data)

    patch.setattr(file, "_verify", seen)
    file._number = -1
    return found


def test_columns_of_long_rows_are_read_without_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "BLOCK", SMALL)
    monkeypatch.setattr(files, "BLOCK", SMALL)
    full = torch.arange(4 * 400.0).view(4, 400)  # 1,600 bytes, 25 blocks, of a row
    path = tmp_path / "model.safetensors"
    info = write_file(Disk(), path, [("x", torch.float32, Box((0, 0), (4, 400)))], [full], "crc32")
    with ShardFile(path, info, "crc32") as file:
        read = read_blocks(file, monkeypatch)
        target = torch.zeros(4, 8)
        file.read(file.entries["x"], Box((0, 100), (4, 8)), target)
        assert torch.equal(target, full[:, 100:108])
        assert len(read) <= 4 * 2


def test_short_reads_are_continued_and_errors_name_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, full, read = tmp_path / "model.safetensors", torch.arange(100.0), os.preadv
    info = write_file(Disk(), path, [("x", torch.float32, Box((0,), (100,)))], [full], "crc32")
    monkeypatch.setattr(files, "_POPULATE_READ", UNKNOWN)
    monkeypatch.setattr(os, "preadv", lambda file, into, offset: read(file, [into[0][:7]], offset))
    with ShardFile(path, info, "crc32") as file:
        target = torch.zeros(100)
        file.read(file.entries["x"], Box((0,), (100,)), target)
        assert torch.equal(target, full)

    def fails(file: int, into: Any, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors: Input/output error"):
        ShardFile(path, info, "crc32")


def test_blocks_are_mapped_if_the_system_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if sys.platform != "linux" or release is None or tuple(map(int, release.groups())) < (5, 14):
        pytest.skip("only Linux from 5.14 on reads a mapping with an error instead of a signal")
    path, full = tmp_path / "model.safetensors", torch.arange(100.0)
    info = write_file(Disk(), path, [("x", torch.float32, Box((0,), (100,)))], [full], "crc32")
    monkeypatch.delattr(os, "preadv")
    with ShardFile(path, info, "crc32") as file:
        target = torch.zeros(90)
        file.read(file.entries["x"], Box((10,), (90,)), target)
        assert torch.equal(target, full[10:])


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_file_that_is_cut_while_it_is_read(is_mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, size = tmp_path / "model.safetensors", 3 * sums.BLOCK // 4
    info = write_file(Disk(), path, [("x", torch.float32, Box((0,), (size,)))], [torch.ones(size)], "crc32")
    if not is_mapped:
        monkeypatch.setattr(files, "_POPULATE_READ", UNKNOWN)
    with ShardFile(path, info, "crc32") as file:
        os.truncate(path, sums.BLOCK + 1)
        with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors: the file was cut while it was read"):
            file.verify()


def test_memory_of_copies_is_used_again() -> None:
    leaf = LeafLayout("params", "x", (4, 2), torch.float32, (Piece(P("data")),))
    plan, copies = plan_save([leaf], Mesh(data=2)), Copies()
    addresses = []
    for state in (torch.arange(8.0).view(4, 2), torch.ones(4, 2)):
        shards = state.clone().chunk(2)
        held = [(shard, plan.rank(rank)) for rank, shard in enumerate(shards)]
        read = [
            copies.of(rank, items, lambda item, shard=shard: [part.view(shard) for part in item.parts])
            for rank, (shard, items) in enumerate(held)
        ]
        for shard in shards:
            shard.zero_()  # as a step that is given the state does
        found = [x for copied, (_, items) in zip(read, held, strict=True) for item in items for x in copied(item)]
        assert torch.equal(torch.cat(found), state)
        addresses.append([x.data_ptr() for x in found])
    assert addresses[0] == addresses[1]
