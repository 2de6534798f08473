"""Saving: each rank writes its boxes and reports through the store, also from a thread, and rank 0 commits."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from .disk import Disk
from .files import FileInfo, Tensors, write_files
from .folder import RunFolder, temporary
from .format import VERSION, encode, plan_to_json
from .peers import Peers
from .plan import SavePlan, WriteItem
from .sums import default_algorithm

_SHORTEST, _LONGEST = 0.001, 0.05  # seconds between two reads of the store


@dataclass(frozen=True)
class Contents:
    plan: SavePlan
    shard: Callable[[int, int], torch.Tensor]  # returns the held tensor of an index and a rank of this process
    numbers: dict[str, bool | int | float]  # leaves that are Python numbers, by kind and key
    body: dict[str, Any]  # the rest of `checkpoint.json`

    def tensors(self, rank: int) -> Tensors:
        return lambda item: (part.view(self.shard(part.held, rank)) for part in item.parts)


class Copies:
    """Main memory for copies of the boxes that this process writes. The next save reuses it: new memory is slower."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str, str, int], list[torch.Tensor]] = {}

    def of(self, rank: int, items: Sequence[WriteItem], tensors: Tensors) -> Tensors:
        old, found = self._held, {}
        for item in items:
            name = (rank, item.leaf.kind, item.leaf.key, item.number)
            parts = [part.detach() for part in tensors(item)]
            memory = old.pop(name, [])
            if [(x.shape, x.dtype) for x in memory] != [(x.shape, x.dtype) for x in parts]:
                memory = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in parts]
            for into, part in zip(memory, parts, strict=True):
                into.copy_(part)
            found[name] = memory
        self._held = {name: memory for name, memory in old.items() if name[0] != rank} | found
        return lambda item: found[rank, item.leaf.kind, item.leaf.key, item.number]


@dataclass
class Save:
    peers: Peers
    disk: Disk
    made: Path  # the temporary folder
    step: int
    nonce: str
    text: Callable[[dict[str, FileInfo]], bytes]
    work: list[tuple[int, list[WriteItem], Tensors]]
    algorithm: str
    keep: int | None
    size: int  # bytes of all files, without headers
    _thread: threading.Thread | None = field(default=None, repr=False)
    _problem: str = ""

    def run(self) -> None:
        try:
            files: dict[str, FileInfo] = {}
            for rank, items, tensors in self.work:
                files |= write_files(self.disk, self.made, rank, items, tensors, self.algorithm)
            self.work = []
            self._report(files)
        except Exception as error:
            self._fail(_told(error, self.made.parent, self.size))

    def start(self) -> None:
        self._thread = threading.Thread(target=self.run, name=f"checkpoint of step {self.step}")
        self._thread.start()

    def is_running_anywhere(self) -> bool:
        mine = self._thread is not None and self._thread.is_alive()
        return any(self.peers.exchange(mine, "to see whether a checkpoint is written"))

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def wait(self) -> None:
        self.join()
        try:
            self.peers.agree(self._problem, "after a checkpoint")
        except CheckpointError:
            if self.peers.rank == 0:  # no process writes there any more
                with suppress(OSError):
                    self.disk.remove(self.made)
            raise

    # --- reports ---

    def _report(self, files: dict[str, FileInfo]) -> None:
        store = self.peers.store
        if store is None:
            self._commit(files)
            return
        if self.peers.rank:
            store.set(self._key(self.peers.rank), json.dumps(files))
            self._wait([self._key("done")])
            return
        others = [self._key(rank) for rank in range(1, self.peers.size)]
        self._wait(others)
        for key in others:
            files |= {name: FileInfo(*each) for name, each in json.loads(store.get(key)).items()}
        self._commit(files)
        store.set(self._key("done"), "")

    def _commit(self, files: dict[str, FileInfo]) -> None:
        run = RunFolder.of(self.disk, self.made.parent, self.nonce)
        run.commit(self.made, self.step, self.nonce, self.text(files))
        if self.keep is not None:
            run.keep(self.keep, self.nonce)

    def _fail(self, problem: str) -> None:
        self._problem = self._problem or problem
        if self.peers.store is not None:
            self.peers.store.set(self._key("failed"), "")

    def _wait(self, keys: list[str]) -> None:
        assert self.peers.store is not None
        pause, began = _SHORTEST, time.monotonic()
        while not self.peers.store.check(keys):
            if self.peers.store.check([self._key("failed")]):
                raise CheckpointError("")  # that process has the reason, which `wait` exchanges
            missing = self.peers.missing()
            if missing or time.monotonic() - began > self.peers.timeout:
                raise CheckpointError(
                    f"the checkpoint of step {self.step} is not committed: "
                    f"{missing or f'other ranks have not written their files within {self.peers.timeout:.0f} s'}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _key(self, what: object) -> str:
        return f"functional_parallel/checkpoint/{self.nonce}/{what}"


def _told(error: Exception, folder: Path, size: int) -> str:
    if not isinstance(error, OSError):
        return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    told = f"{error.filename or folder}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            written = sum(each.lstat().st_blocks for each in folder.glob("*.tmp-*/*/*")) * 512
            free = shutil.disk_usage(folder).free + written
            told += f". The checkpoint needs {size:,} bytes in {folder}, and {free:,} were free before it"
    return told


def require_only(only: str | None) -> None:
    if only not in (None, "trained"):
        raise ValueError(f"only={only!r}: it is 'trained', to leave out frozen parameters, or None")


def begin_save(
    peers: Peers,
    folder: Path,
    contents: Contents,
    *,
    keep: int | None = None,
    copies: Copies | None = None,
    disk: Disk | None = None,
) -> Save:
    disk, step = disk or Disk(), int(contents.body["step"])
    nonce, problem = secrets.token_hex(8), ""
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in contents.plan.leaves)
    if peers.rank == 0:
        try:
            RunFolder.of(disk, folder, nonce).begin(step, nonce)
        except (OSError, CheckpointError) as error:
            problem = _told(error, folder, size)
    (nonce, problem), *_ = peers.exchange((nonce, problem), "before a checkpoint")
    if problem:
        raise CheckpointError(problem)
    made = temporary(folder, step, nonce)
    if peers.size > 1 and peers.store is None:  # of a backend without one, such as MPI
        peers = replace(peers, store=dist.FileStore(str(folder / f".reports-{nonce}"), peers.size))
    algorithm = default_algorithm()
    work = []
    for rank in peers.ranks:
        items, tensors = contents.plan.rank(rank), contents.tensors(rank)
        work.append((rank, items, tensors if copies is None else copies.of(rank, items, tensors)))

    def text(files: dict[str, FileInfo]) -> bytes:
        body = {"version": VERSION, "nonce": nonce, "torch": torch.__version__, "sums": algorithm}
        named = {name: [info.size, info.sums] for name, info in sorted(files.items())}
        whole = {**body, **contents.body, **plan_to_json(contents.plan), "numbers": contents.numbers, "files": named}
        return encode(whole, algorithm)

    found = (made / "params").is_dir()
    host = f"{os.uname().nodename} does not see {made}: the folder of checkpoints must be shared by all hosts"
    peers.agree("" if found else host, "before a checkpoint")
    return Save(peers, disk, made, step, nonce, text, work, algorithm, keep, size)
