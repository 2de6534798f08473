"""Shard files of one rank: written box by box with checksums, and read back block by block, verified."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sharding_specs import Box

from ..errors import DamagedCheckpointError
from ..ir import memory_of
from .disk import Disk
from .format import Entry, file_name, header, parse_header
from .plan import WriteItem
from .sums import BLOCK, BlockSums, hasher

Tensors = Callable[[WriteItem], Iterable[torch.Tensor]]


class FileInfo(NamedTuple):
    """Size of a file in bytes, and the checksum of each of its blocks."""

    size: int
    sums: list[str]


def write_files(
    disk: Disk, folder: Path, rank: int, items: Sequence[WriteItem], tensors: Tensors, algorithm: str
) -> dict[str, FileInfo]:
    """Write the boxes of a rank and wait until they are safe. Return the files by name, relative to the folder.

    `tensors` returns the tensors of a box, in order along dim 0. At most one of them is copied at a time.
    """
    found = {}
    counts: dict[str, int] = {}
    for item in items:
        counts[item.leaf.kind] = max(counts.get(item.leaf.kind, 0), item.number + 1)
    for (kind, number), group in groupby(items, key=lambda item: (item.leaf.kind, item.number)):
        name, boxes = f"{kind}/{file_name(rank, number, counts[kind])}", list(group)
        entries = [(item.leaf.key, item.leaf.dtype, item.box) for item in boxes]
        data = (x for item in boxes for x in tensors(item))
        found[name] = write_file(disk, folder / name, entries, data, algorithm)
    return found


def write_file(
    disk: Disk,
    path: Path,
    entries: Sequence[tuple[str, torch.dtype, Box]],
    data: Iterable[torch.Tensor],
    algorithm: str,
) -> FileInfo:
    """Write a safetensors file and wait until it is safe. `data` has the tensors of the entries, in order."""
    first = header(entries)
    size, sums = len(first) + sum(box.numel * dtype.itemsize for _, dtype, box in entries), BlockSums(algorithm)
    with disk.create(path, size) as file:
        place = 0

        def write(data: memoryview) -> None:
            nonlocal place
            for start in range(0, len(data), BLOCK):
                part = data[start : start + BLOCK]
                sums.update(part)
                disk.write(file, part, place)
                place += len(part)

        write(memoryview(first))
        for each in data:
            host = each.detach().to("cpu").contiguous()
            write(memory_of(host))
        if place != size:
            raise AssertionError(f"{path}: {place} bytes were written of {size}")
        disk.sync(file)
    return FileInfo(size, sums.finish())


class ShardFile:
    """A safetensors file. Every block is verified when it is read, if its checksums are known.

    Args:
        path: the file.
        info: its size and checksums; None for a file of another library.
        algorithm: the algorithm of the checksums.
    """

    def __init__(self, path: Path, info: FileInfo | None = None, algorithm: str = "crc32") -> None:
        self.path, self._sums, self._new = path, None if info is None else info.sums, hasher(algorithm)
        self._last: tuple[int, memoryview] = (-1, memoryview(b""))
        self._memory = torch.empty(0, dtype=torch.uint8)
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {error.strerror}") from error
        self.size = os.fstat(self._file).st_size
        if info is not None and (self.size != info.size or len(info.sums) != -(-self.size // BLOCK)):
            self.close()
            raise DamagedCheckpointError(f"{path}: the file has {self.size:,} bytes, and {info.size:,} were written")
        self.entries = self._entries()

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _entries(self) -> dict[str, Entry]:
        try:
            length = int.from_bytes(self.block(0)[:8], "little")
            stop = min(8 + length, self.size)
            head = b"".join(bytes(self.block(number)) for number in range(-(-stop // BLOCK)))
            return parse_header(head[:stop], self.size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            self.close()
            raise DamagedCheckpointError(
                f"{self.path}: it is not a safetensors file of a checkpoint: {error}"
            ) from None

    def block(self, number: int) -> memoryview:
        """Return a block. It is valid until the next call.

        Raises:
            DamagedCheckpointError: if its checksum is wrong.
        """
        if self._last[0] != number:
            data = memoryview(os.pread(self._file, BLOCK, number * BLOCK))
            self._verify(number, data)
            self._last = (number, data)
        return self._last[1]

    def _verify(self, number: int, data: memoryview) -> None:
        if self._sums is None:
            return
        made = self._new()
        made.update(data)
        if made.hexdigest() != self._sums[number]:
            begin = number * BLOCK
            raise DamagedCheckpointError(
                f"{self.path}: bytes {begin:,} to {begin + len(data):,} are damaged: their checksum is wrong"
            )

    def _stage(self, size: int) -> torch.Tensor:
        """Return memory for one box, which is used again for the next one."""
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size]

    def verify(self) -> None:
        """Read all blocks."""
        for number in range(-(-self.size // BLOCK)):
            self.block(number)

    def read(self, entry: Entry, common: Box, target: torch.Tensor) -> None:
        """Copy a box of an entry into a tensor of its shape, which may have another dtype and device."""
        if not common.numel:
            return
        strides = [math.prod(entry.box.size[dim + 1 :]) for dim in range(len(entry.box.size))]
        inside, size = common.within(entry.box), entry.dtype.itemsize
        first = sum(map(math.prod, zip(inside.start, strides, strict=True)))
        span = 1 + sum((count - 1) * stride for count, stride in zip(common.size, strides, strict=True))
        begin, end = entry.begin + first * size, entry.begin + (first + span) * size
        is_run = span == common.numel
        direct = is_run and target.is_contiguous() and target.dtype == entry.dtype and target.device.type == "cpu"
        stage = target if direct else self._stage(span * size).view(entry.dtype)
        memory = memory_of(stage)
        for number in self._needed(begin, end, common, strides, size):
            low, high = max(begin, number * BLOCK), min(end, (number + 1) * BLOCK)
            part = memory[low - begin : high - begin]
            if len(part) == BLOCK and self._last[0] != number:
                if os.preadv(self._file, [part], low) != BLOCK:
                    raise DamagedCheckpointError(f"{self.path}: the file was cut while it was read")
                self._verify(number, part)
            else:
                part[:] = self.block(number)[low - number * BLOCK : high - number * BLOCK]
        if not direct:
            target.copy_(stage.as_strided(common.size, strides))

    def _needed(self, begin: int, end: int, common: Box, strides: Sequence[int], size: int) -> Iterator[int]:
        """Yield the blocks with bytes of a box. Each index of a dim is visited if its stride exceeds a block."""
        far = [dim for dim, stride in enumerate(strides) if stride * size > BLOCK and common.size[dim] > 1]
        if not far:
            yield from range(begin // BLOCK, (end - 1) // BLOCK + 1)
            return
        dim = far[0]
        inner = sum((c - 1) * s for c, s in zip(common.size[dim + 1 :], strides[dim + 1 :], strict=True)) + 1
        after = Box(common.start[dim + 1 :], common.size[dim + 1 :])
        last = -1
        for index in range(common.size[dim]):
            low = begin + index * strides[dim] * size
            for number in self._needed(low, low + inner * size, after, strides[dim + 1 :], size):
                if number > last:
                    yield number
                    last = number
