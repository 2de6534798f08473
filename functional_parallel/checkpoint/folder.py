"""Folder of the checkpoints of a run: names, the lock of the run that writes, the commit, and the removal of old ones.

A checkpoint is written into `step_00000100.tmp-<nonce>` and renamed when every byte of it is safe. Other suffixes:
`.bad-` was found damaged, `.old-` is being replaced and counts until the new one is there, `.gone-` is being removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

from ..errors import CheckpointError, RemovedCheckpointError
from .disk import Disk
from .format import NAME
from .opened import REMOVES, Checkpoint

T = TypeVar("T")

_STEP = re.compile(r"step_(\d{8,})(\.old-\w+)?")
_LOCK = ".lock"


def committed(folder: Path) -> list[Path]:
    found: dict[int, Path] = {}
    for each in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        match = _STEP.fullmatch(each.name)
        if match and (match[2] is None or int(match[1]) not in found):
            found[int(match[1])] = each
    return [found[step] for step in sorted(found, reverse=True)]


def candidates(path: Path, step: int | None = None) -> list[Path]:
    """Return the checkpoints that a path may mean, the newest first: itself, or all of a run's folder."""
    own = _STEP.fullmatch(path.name)
    if (path / NAME).exists() or (own and path.is_dir()):
        found = [path]
    else:  # the other name of a checkpoint that is being replaced
        found = [each for each in committed(path.parent if own else path) if not own or _step_of(each) == int(own[1])]
    wanted = [each for each in found if step is None or _step_of(each) == step]
    if not wanted:
        steps = list(map(_step_of, reversed(found)))
        held = f"it has steps {', '.join(map(str, steps))}" if found else "no step has been committed there"
        of_step = "" if step is None else f" of step {step}"
        removed = f"; {REMOVES}" if own or (step is not None and steps and step < steps[-1]) else ""
        where = held if path.is_dir() else "no such folder"
        raise CheckpointError(f"{path}: there is no checkpoint{of_step}; {where}{removed}")
    return wanted


def _step_of(path: Path) -> int:
    return int(path.name[len("step_") :].partition(".")[0])


def newest(path: Path, step: int | None, use: Callable[[Checkpoint], T]) -> T:
    """Return the result of `use` on a checkpoint. If a run removes it meanwhile, use the newest. Try `TRIES` times."""
    removed = ""
    for _ in range(TRIES):
        try:
            found = candidates(path, step)
        except CheckpointError as error:
            raise RemovedCheckpointError(removed) if removed else error from None
        try:
            return use(Checkpoint(found[0]))
        except RemovedCheckpointError as error:
            removed = str(error)
    raise RemovedCheckpointError(TOO_FAST.format(path=path))


TRIES = 100  # each of them of another checkpoint
TOO_FAST = (
    "{path}: the newest checkpoint was removed while it was read, 100 times in a row: the run saves faster than this "
    "process reads; give its Saver a larger keep"
)


def temporary(folder: Path, step: int, nonce: str) -> Path:
    return folder / f"step_{step:08d}.tmp-{nonce}"


class RunFolder:
    """Folder of one run's checkpoints. Another run may not write to it. Only the process of rank 0 has this object."""

    _open: ClassVar[dict[Path, RunFolder]] = {}

    @classmethod
    def of(cls, disk: Disk, path: Path, nonce: str) -> RunFolder:
        found = cls._open.get(path.absolute())
        if found is None or found.process != os.getpid() or not (path / _LOCK).exists():  # the folder was removed
            cls._open[path.absolute()] = found = cls(disk, path, nonce)
        found.disk = disk
        return found

    def __init__(self, disk: Disk, path: Path, nonce: str) -> None:
        self.disk, self.path, self.nonce, self.process = disk, path, nonce, os.getpid()
        disk.make_folder(path)
        disk.sync_folder(path.absolute().parent)
        self._lock = self._taken()
        for each in path.iterdir():  # left by a run that was killed
            if re.fullmatch(r"step_\d+\.(tmp|gone)-\w+", each.name) or self._is_replaced(each):
                disk.remove(each)

    def _is_replaced(self, path: Path) -> bool:
        match = _STEP.fullmatch(path.name)
        return match is not None and match[2] is not None and (self.path / path.name.removesuffix(match[2])).exists()

    def _taken(self) -> int:
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with this process; forks do not have it
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                owner = os.read(lock, 4096).decode(errors="replace")
                os.close(lock)
                raise CheckpointError(
                    f"{self.path}: another run writes checkpoints here ({owner or 'it has just started'}): end it, or "
                    "save to another folder"
                ) from None  # without locks in the file system, `require_own` still detects a second run
        os.truncate(lock, 0)
        os.pwrite(lock, self._owner().encode(), 0)
        return lock

    def _owner(self) -> str:
        return f"process {self.process} on {socket.gethostname()}, run {self.nonce}"

    def require_own(self) -> None:
        lock = self.path / _LOCK
        try:  # closing any descriptor of the file would release the lock
            mine = lock.stat().st_ino == os.fstat(self._lock).st_ino
            owner = os.pread(self._lock, 4096, 0).decode(errors="replace") if mine else lock.read_text(errors="replace")
        except OSError as error:
            raise CheckpointError(f"{lock}: {error.strerror}") from error
        if owner != self._owner():
            raise CheckpointError(
                f"{self.path}: another run ({owner}) now writes to this folder: save to another folder"
            )

    def begin(self, step: int, nonce: str) -> None:
        for kind in ("params", "optimizer"):
            self.disk.make_folder(temporary(self.path, step, nonce) / kind)

    def commit(self, made: Path, step: int, nonce: str, text: bytes) -> None:
        disk, target = self.disk, self.path / f"step_{step:08d}"
        with disk.create(made / NAME, len(text)) as file:
            disk.write(file, memoryview(text), 0)
            disk.sync(file)
        for folder in (made / "params", made / "optimizer", made):
            disk.sync_folder(folder)
        self.require_own()
        replaced = None
        if target.exists():
            replaced = target.with_name(f"{target.name}.{'old' if _is_complete(target) else 'bad'}-{nonce}")
            disk.rename(target, replaced)
        try:
            disk.rename(made, target)
        except OSError:
            if replaced is not None:
                disk.rename(replaced, target)
            raise
        disk.sync_folder(self.path)
        if replaced is not None and ".old-" in replaced.name:
            self._remove(replaced, nonce)

    def keep(self, count: int, nonce: str) -> None:
        for each in committed(self.path)[count:]:
            self._remove(each, nonce)

    def _remove(self, path: Path, nonce: str) -> None:
        gone = path.with_name(f"{path.name.partition('.')[0]}.gone-{nonce}")
        self.disk.rename(path, gone)
        self.disk.sync_folder(self.path)
        self.disk.remove(gone)


def _is_complete(path: Path) -> bool:
    try:
        Checkpoint(path)
    except CheckpointError:
        return False
    return True
