"""Operations on the file system. A test replaces them by operations that lose unsynced data."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOT_SUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class Disk:
    """The file system of this host. Data and names are safe only after `sync` and `sync_folder`."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def create(self, path: Path, size: int) -> Iterator[int]:
        """Create a file and reserve its blocks, so that a full disk shows before the first byte."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if size and hasattr(os, "posix_fallocate"):
                try:
                    os.posix_fallocate(descriptor, 0, size)
                except OSError as error:
                    if error.errno not in _NOT_SUPPORTED:
                        raise
            yield descriptor
        except OSError as error:  # one of a descriptor does not name its file
            error.filename = error.filename or str(path)
            raise
        finally:
            os.close(descriptor)

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        while len(data):
            done = os.pwrite(descriptor, data, offset)
            data, offset = data[done:], offset + done

    def sync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            for each in sorted(path.iterdir()):
                self.remove(each)
            self.remove_folder(path)
        else:
            self.unlink(path)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        path.rmdir()
