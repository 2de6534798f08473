"""Blocks on disk: files that hold tensors, so that they use neither the device's memory nor the host's.

A block is a file without a name: it ends with the last tensor in it, or with the process. So a killed process leaves
nothing behind, no file is stale, and two runs may share a folder. A tensor of a block is mapped, so that it is passed
and laid out as others are, but it is read and written by calls on its file. They report errors of the disk, which
accesses to a mapping do not: those would end the process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DiskError
from ..quantities import readable_bytes

_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EISDIR, errno.ENOENT)
_MOST = 1 << 30  # bytes of one call


@dataclass(frozen=True)
class _Block:
    file: int  # its descriptor
    folder: str


_BLOCKS: dict[int, _Block] = {}  # by the address of their storages


def require_folder(folder: str | Path) -> str:
    """Return the path of a folder where blocks can be made."""
    path = str(Path(folder).expanduser().resolve())
    try:
        os.close(_nameless(path))
    except OSError as error:
        raise DiskError(f"{path}: no block can be made in this folder: {error}. Make the folder first") from error
    return path


def is_on_disk(x: Tensor) -> bool:
    return bool(_BLOCKS) and x.untyped_storage().data_ptr() in _BLOCKS


def folder_of(x: Tensor) -> str:
    return _BLOCKS[x.untyped_storage().data_ptr()].folder


def empty_on_disk(shape: Sequence[int], dtype: torch.dtype, folder: str) -> Tensor:
    """Return a tensor of zeros in a new block of a folder. Its bytes are reserved.

    Raises:
        DiskError: if the folder cannot be written, or has no room.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    if not size:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        file = _nameless(folder)
        try:
            _reserve(file, size)
            storage: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{file}", True, size)
        except BaseException:
            os.close(file)
            raise
    except (OSError, RuntimeError) as error:
        raise DiskError(_no_room(folder, size, error)) from error
    address = storage.data_ptr()
    _BLOCKS[address] = _Block(file, folder)
    weakref.finalize(storage, _end, address, file)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape), strides)


def read(x: Tensor, into: Tensor) -> Tensor:
    """Copy a tensor of a block into one of main memory, and return it."""
    if not x.is_contiguous():
        return into.copy_(x)  # through the mapping
    if not x.numel():
        return into
    block, at = _place(x)
    return _transfer(block, into, at, lambda data, offset: os.preadv(block.file, [data], offset), "read")


def write(x: Tensor, new: Tensor) -> Tensor:
    """Copy a tensor of main memory into one of a block, and return that."""
    if not x.numel():
        return x
    block, at = _place(x)
    _transfer(block, new.contiguous(), at, lambda data, offset: os.pwritev(block.file, [data], offset), "written")
    return x


def _place(x: Tensor) -> tuple[_Block, int]:
    assert x.is_contiguous(), "blocks hold contiguous tensors"
    return _BLOCKS[x.untyped_storage().data_ptr()], int(x.storage_offset()) * x.element_size()


def _transfer(block: _Block, x: Tensor, at: int, call: Callable[[memoryview, int], int], what: str) -> Tensor:
    size = x.numel() * x.element_size()
    data = memoryview((ctypes.c_char * size).from_address(x.data_ptr())).cast("B")
    done = 0
    while done < size:
        try:
            moved = call(data[done : done + _MOST], at + done)
        except OSError as error:
            raise DiskError(_failed(block, what, size, str(error))) from error
        if not moved:
            raise DiskError(_failed(block, what, size, f"the file ends after {done} bytes"))
        done += moved
    return x


def _nameless(folder: str) -> int:
    flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0)
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(folder, flags | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED or not Path(folder).is_dir():
                raise
    file, name = tempfile.mkstemp(dir=folder)
    os.unlink(name)
    return file


def _reserve(file: int, size: int) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        os.truncate(file, size)


def _end(address: int, file: int) -> None:
    """Forget a block. A child that was forked has the descriptors of its parent, and closes its own."""
    _BLOCKS.pop(address, None)
    os.close(file)


def _no_room(folder: str, size: int, error: Exception) -> str:
    if "Too many open files" in str(error):
        return (
            f"{folder}: no block of {readable_bytes(size)} can be made: this process may not open more files "
            f"({error}). Each tensor on disk is one; allow more, as by `ulimit -n 65536`"
        )
    try:
        free = f"{readable_bytes(shutil.disk_usage(folder).free)} are free"
    except OSError:
        free = "it cannot be read"
    return (
        f"{folder}: no block of {readable_bytes(size)} can be made in this folder ({free}): {error}. Give a folder on "
        "a disk with room for the whole state of this rank, fp.offload(…, path=…)"
    )


def _failed(block: _Block, what: str, size: int, why: str) -> str:
    return (
        f"{block.folder}: {readable_bytes(size)} of a tensor on this disk could not be {what}: {why}. The state of "
        "this step is lost: go on from the last checkpoint, with a folder on another disk"
    )
