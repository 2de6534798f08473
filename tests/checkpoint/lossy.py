"""A file system that stops after a number of operations and loses what was not synced.

It performs every operation, and keeps beside it what would survive. Names are safe after a sync of their folder, data
after a sync of their file. What was not synced may be there or not: `survivors` yields several outcomes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from functional_parallel.checkpoint.disk import Disk

__all__ = ["CarelessDisk", "LossyDisk", "PowerCut"]


class PowerCut(BaseException):
    """Ends a process at once."""


@dataclass(eq=False)
class _File:
    data: bytearray
    safe: bytes | None = None


@dataclass(eq=False)
class _Folder:
    names: dict[str, Any] = field(default_factory=dict)
    safe: dict[str, Any] = field(default_factory=dict)


class LossyDisk(Disk):
    """Stops before operation number `stop`. `root` exists and is safe."""

    def __init__(self, root: Path, stop: int | None = None) -> None:
        self.root, self.stop, self.done = root, stop, 0
        self.tree = _Folder()
        self._open: dict[int, _File] = {}

    def _step(self) -> None:
        if self.done == self.stop:
            raise PowerCut
        self.done += 1

    def _parent(self, path: Path) -> _Folder:
        found = self.tree
        for name in path.relative_to(self.root).parts[:-1]:
            found = found.names[name]
        return found

    def _node(self, path: Path) -> Any:
        return self.tree if path == self.root else self._parent(path).names[path.name]

    def make_folder(self, path: Path) -> None:
        if not path.exists():
            self.make_folder(path.parent)
            self._step()
            super().make_folder(path)
            self._parent(path).names[path.name] = _Folder()

    @contextmanager
    def create(self, path: Path, size: int) -> Iterator[int]:
        self._step()
        with super().create(path, size) as descriptor:
            made = self._parent(path).names[path.name] = _File(bytearray(size))
            self._open[descriptor] = made
            yield descriptor

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        self._step()
        super().write(descriptor, data, offset)
        self._open[descriptor].data[offset : offset + len(data)] = data

    def sync(self, descriptor: int) -> None:
        self._step()
        self._open[descriptor].safe = bytes(self._open[descriptor].data)

    def sync_folder(self, path: Path) -> None:
        if path.is_relative_to(self.root):
            self._step()
            node = self._node(path)
            node.safe = dict(node.names)

    def rename(self, old: Path, new: Path) -> None:
        self._step()
        super().rename(old, new)
        self._parent(new).names[new.name] = self._parent(old).names.pop(old.name)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)
        self._parent(path).names.pop(path.name, None)

    def remove_folder(self, path: Path) -> None:
        self._step()
        super().remove_folder(path)
        self._parent(path).names.pop(path.name)

    def survivors(self, folder: Path, seed: int) -> Iterator[Path]:
        """Yield folders with what is there after the cut, from nothing that was not synced to all of it."""
        for number, (names, data) in enumerate([("safe", "safe"), ("safe", "all"), ("all", "safe"), ("all", "torn")]):
            target = folder / str(number)
            self._written(self.tree, target, names, data, random.Random(seed))
            yield target

    def _written(self, node: Any, target: Path, names: str, data: str, chance: random.Random) -> None:
        if isinstance(node, _Folder):
            target.mkdir(parents=True, exist_ok=True)
            for name, each in (node.safe if names == "safe" else node.names).items():
                self._written(each, target / name, names, data, chance)
            return
        safe = node.safe if node.safe is not None else bytes(len(node.data))  # reserved, so zeros
        if data == "torn" and node.safe is None:
            cut = chance.randint(0, len(node.data))
            target.write_bytes(bytes(node.data[:cut]) + safe[cut:])
        else:
            target.write_bytes(bytes(node.data) if data == "all" else safe)


class CarelessDisk(LossyDisk):
    """A library that does not sync files."""

    def sync(self, descriptor: int) -> None:
        self._step()
