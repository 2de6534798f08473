"""Shard files of one rank: written box by box with checksums, and read back block by block, verified."""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
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
from .sums import BLOCK, hasher

Tensors = Callable[[WriteItem], Iterable[torch.Tensor]]
_POPULATE_READ = 22  # of Linux 5.14: reads the mapped pages, so that a fault of the disk is an error here, not a signal


class FileInfo(NamedTuple):
    size: int
    sums: list[str]


def write_files(
    disk: Disk, folder: Path, rank: int, items: Sequence[WriteItem], tensors: Tensors, algorithm: str
) -> dict[str, FileInfo]:
    """Write the boxes of a rank and wait until they are safe. Return the files by name, relative to the folder."""
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
    first = header(entries)
    size = len(first) + sum(box.numel * dtype.itemsize for _, dtype, box in entries)
    made, sums, place = hasher(algorithm)(), list[str](), 0

    def stretches() -> Iterator[memoryview]:
        yield memoryview(first)
        for each in data:
            host = each.detach().to("cpu").contiguous()  # it lives until its memory is written
            yield memory_of(host)

    with disk.create(path, size) as file:
        for each in stretches():
            while len(each):
                part, each = each[: BLOCK - place % BLOCK], each[BLOCK - place % BLOCK :]
                made.update(part)
                disk.write(file, part, place)
                place += len(part)
                if place % BLOCK == 0 or place == size:
                    sums.append(made.hexdigest())
                    made = hasher(algorithm)()
        if place != size:
            raise AssertionError(f"{path}: {place} bytes were written of {size}")
        disk.sync(file)
    return FileInfo(size, sums)


class ShardFile(AbstractContextManager["ShardFile"]):
    """A safetensors file. Every block is verified when it is read.

    `info` is None for a file of another library, which has no checksums: only the bytes that are wanted are read.
    """

    def __init__(self, path: Path, info: FileInfo | None = None, algorithm: str = "crc32") -> None:
        self.path, self._sums, self._new = path, None if info is None else info.sums, hasher(algorithm)
        self._number, self._last = -1, torch.empty(0, dtype=torch.uint8, device="cpu")  # the last block that was read
        try:
            if stat.S_ISFIFO(os.stat(path).st_mode):  # opening one waits for a writer
                raise DamagedCheckpointError(f"{path}: it is a pipe, not a file")
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {error.strerror}") from error
        self.size = os.fstat(self._file).st_size
        try:
            if info is not None and (self.size != info.size or len(info.sums) != -(-self.size // BLOCK)):
                raise DamagedCheckpointError(f"{path}: the file has {self.size:,} bytes; {info.size:,} were written")
            self.entries = self._entries()
        except DamagedCheckpointError:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._file)

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _entries(self) -> dict[str, Entry]:
        try:
            stop = min(8 + int.from_bytes(self._first(min(8, self.size)), "little"), self.size)
            return parse_header(self._first(stop), self.size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"{self.path}: it is not a safetensors file of a checkpoint: {error}"
            ) from None

    def _first(self, count: int) -> bytes:
        if self._sums is None:
            found = bytearray(count)
            self._read_into(memoryview(found), 0)
            return bytes(found)
        blocks = (memory_of(self.block(start // BLOCK))[: count - start] for start in range(0, count, BLOCK))
        return b"".join(map(bytes, blocks))

    def block(self, number: int) -> torch.Tensor:
        """Return the bytes of a block, verified. They are valid until the next call."""
        if self._number != number:
            self._number, begin = -1, number * BLOCK
            self._last = self._load(begin, min(begin + BLOCK, self.size))
            self._verify(number, memory_of(self._last))
            self._number = number
        return self._last

    def _load(self, begin: int, end: int) -> torch.Tensor:
        first = begin - begin % mmap.ALLOCATIONGRANULARITY
        try:
            mapped = mmap.mmap(self._file, end - first, access=mmap.ACCESS_COPY, offset=first)
            mapped.madvise(_POPULATE_READ)
            return torch.frombuffer(mapped, dtype=torch.uint8, offset=begin - first)
        except (OSError, ValueError):  # an old system, or a fault that reading names
            return self._read(begin, end)

    def _read(self, begin: int, end: int) -> torch.Tensor:
        found = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
        self._read_into(memory_of(found), begin)
        return found

    def _read_into(self, memory: memoryview, begin: int) -> None:
        while len(memory):
            try:
                count = os.preadv(self._file, [memory], begin)
            except OSError as error:
                raise DamagedCheckpointError(f"{self.path}: {error.strerror}") from error
            if not count:
                raise DamagedCheckpointError(f"{self.path}: the file was cut while it was read")
            memory, begin = memory[count:], begin + count

    def _verify(self, number: int, data: memoryview) -> None:
        assert self._sums is not None
        made = self._new()
        made.update(data)
        if made.hexdigest() != self._sums[number]:
            begin = number * BLOCK
            raise DamagedCheckpointError(
                f"{self.path}: bytes {begin:,} to {begin + len(data):,} are damaged: their checksum is wrong"
            )

    def verify(self) -> None:
        for number in range(-(-self.size // BLOCK)):
            self.block(number)

    def read(self, entry: Entry, common: Box, target: torch.Tensor) -> None:
        if self._sums is None:
            self._read_runs(entry, common, target)
            return
        strides = [math.prod(entry.box.size[dim + 1 :]) for dim in range(len(entry.box.size))]
        for part in self._parts(entry, common, strides):
            found = self._bytes(*entry.range(part), entry.dtype).as_strided(part.size, strides)
            target[part.within(common).slices].copy_(found)

    def _read_runs(self, entry: Entry, common: Box, target: torch.Tensor) -> None:
        is_direct = target.dtype == entry.dtype and target.device.type == "cpu" and target.is_contiguous()
        into = target if is_direct else torch.empty(common.size, dtype=entry.dtype, device="cpu")
        memory, place = memory_of(into), 0
        for begin, end in entry.runs(common):
            self._read_into(memory[place : place + end - begin], begin)
            place += end - begin
        if not is_direct:
            target.copy_(into)

    def _bytes(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        pieces = []
        for number in range(begin // BLOCK, (end - 1) // BLOCK + 1):
            piece = self.block(number)[max(0, begin - number * BLOCK) : end - number * BLOCK]
            is_whole = len(piece) == end - begin and piece.storage_offset() % dtype.itemsize == 0
            pieces.append(piece if is_whole else piece.clone())
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(dtype)

    def _parts(self, entry: Entry, box: Box, strides: Sequence[int]) -> Iterator[Box]:
        """Divide a box into boxes in the order of the file. Each is in one block, or is one element in two blocks."""
        dim = next((dim for dim, count in enumerate(box.size) if count > 1), None)
        while box.numel:
            begin, end = entry.range(box)
            room = BLOCK - begin % BLOCK
            if dim is None or end - begin <= room:
                yield box
                return
            stride = strides[dim] * entry.dtype.itemsize
            row = end - begin - (box.size[dim] - 1) * stride  # bytes of one index of the dim
            count = max(0, (room - row) // stride + 1)
            first, box = box.cut(dim, max(1, count))
            yield from [first] if count else self._parts(entry, first, strides)
