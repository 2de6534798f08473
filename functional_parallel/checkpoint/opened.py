"""A committed checkpoint: its description, its verification, and reading boxes of it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sharding_specs import Box, Mesh, P

from ..errors import CheckpointError, DamagedCheckpointError, RemovedCheckpointError
from ..program import columns
from ..quantities import readable_bytes
from .files import FileInfo, ShardFile
from .format import NAME, decode, plan_from_json
from .layouts import LeafLayout, Piece
from .loader_positions import position_of
from .plan import ReadItem, RestorePlan, plan_restore

REMOVES = "a Saver with keep=… removes all but the newest ones"


class LeafInfo(NamedTuple):
    """A leaf of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Checkpoint:
    """A committed checkpoint, opened. `inspect` returns it.

    Attributes:
        path: its folder.
        step: number of completed steps.
        extra: the `extra` argument of `train.save`.
        data_position: position of the run in its samples, as the sampler or loader gave it; None if none was saved.
        mesh: the mesh of the run that saved it.
        leaves: shape and dtype of each tensor, by kind and key: "params/layers/0/w", "optimizer/m/layers/0/w".
        numbers: leaves that are Python numbers, by kind and key.
        left_out: shape and dtype of the frozen leaves that `only="trained"` left out, by kind and key.
    """

    kind = "the checkpoint"  # for messages about leaves that do not fit
    error: type[Exception] = CheckpointError
    cast_hint = "; see cast=True"
    hint = (
        "\nrename={old: new} restores renamed leaves; partial=True with like=… those that both have; resize={path: "
        "'zeros'} with like=… those of another size"
    )

    def __init__(self, path: Path) -> None:
        self.path = path
        self.body: dict[str, Any] = {}
        with self._reading():
            self._open()

    def _open(self) -> None:
        path = self.path
        try:
            self.body = decode((path / NAME).read_bytes())
        except (OSError, CheckpointError) as error:
            raise DamagedCheckpointError(f"{path / NAME}: {getattr(error, 'strerror', error)}") from error
        try:
            self.plan = replace(plan_from_json(self.body), name=str(path / NAME))
            self.mesh = self.plan.mesh
            self.leaves = {f"{leaf.kind}/{leaf.key}": LeafInfo(leaf.shape, leaf.dtype) for leaf in self.plan.leaves}
            self.step, self.nonce = int(self.body["step"]), str(self.body["nonce"])
            self.extra: dict[str, Any] = self.body["extra"]
            self.data_position: Any = position_of(self.body["data_position"])
            self.numbers: dict[str, bool | int | float] = self.body["numbers"]
            left_out = self.body.get("left_out", {}).items()  # none in a checkpoint of an older version
            self.left_out = {key: LeafInfo(tuple(size), getattr(torch, name)) for key, (size, name) in left_out}
            self.files = {name: FileInfo(size, sums) for name, (size, sums) in self.body["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpointError(f"{path / NAME}: {type(error).__name__}: {error}") from None
        for name, info in self.files.items():
            try:
                size = (path / name).stat().st_size
            except OSError as error:
                raise DamagedCheckpointError(f"{path / name}: {error.strerror}") from error
            if size != info.size:
                raise DamagedCheckpointError(
                    f"{path / name}: the file has {size:,} bytes, and {info.size:,} were written"
                )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Context of all reads: if files are missing or changed because the checkpoint is gone, it is not damaged."""
        try:
            yield
        except DamagedCheckpointError:
            if self._is_there():
                raise
            raise RemovedCheckpointError(
                f"{self.path}: it was removed or replaced while it was read; {REMOVES}"
            ) from None

    def _is_there(self) -> bool:
        try:
            return decode((self.path / NAME).read_bytes()) == self.body
        except (OSError, CheckpointError):
            return self.path.is_dir()

    def __str__(self) -> str:
        size = readable_bytes(sum(info.size for info in self.files.values()))
        lines = [
            f"{self.path}: step {self.step} of a run on {self.mesh!r}, {size} in {len(self.files)} files",
            f"data position: {self.data_position}, seed: {self.body['seed']}, extra: {self.extra}",
        ]
        rows: list[tuple[str, ...]] = []
        for name, leaf in self.leaves.items():
            rows.append((name, str(leaf.shape), str(leaf.dtype).removeprefix("torch.")))
        rows += [(name, "number", repr(value)) for name, value in self.numbers.items()]
        rows += [(name, str(leaf.shape), "frozen, left out") for name, leaf in self.left_out.items()]
        return "\n".join([*lines, *columns(rows)] if rows else lines)

    def verify(self) -> None:
        """Read every byte and compare the checksums. Check that the files have all boxes of every leaf.

        Raises:
            DamagedCheckpointError: for the first file that is damaged or differs from `checkpoint.json`.
            RemovedCheckpointError: if the run has removed the checkpoint since it was opened.
        """
        boxes: dict[str, dict[str, Box]] = {name: {} for name in self.files}
        missing = {(leaf.kind, leaf.key): math.prod(leaf.shape) for leaf in self.plan.leaves}
        for rank in self.mesh.ranks:
            for item in self.plan.rank(rank):
                boxes[self._name(item.leaf.kind, rank, item.number)][item.leaf.key] = item.box
                missing[item.leaf.kind, item.leaf.key] -= item.box.numel
        for (kind, key), elements in missing.items():
            if elements:
                raise DamagedCheckpointError(f"{self.path / NAME}: the boxes of {kind} {key!r} have gaps or overlap")
        for name in self.files:
            with self._reading(), self.open(name) as file:
                file.verify()
                if {key: entry.box for key, entry in file.entries.items()} != boxes[name]:
                    raise DamagedCheckpointError(f"{file.path}: it has other boxes than {NAME}")

    def tensor(self, name: str) -> torch.Tensor:
        """Return a full tensor, verified.

        Args:
            name: its kind and key, as in `leaves`.

        Raises:
            KeyError: if there is none of this name.
            DamagedCheckpointError: if a file is damaged.
            RemovedCheckpointError: if the run has removed the checkpoint since it was opened.
        """
        kind, _, key = name.partition("/")
        info, mesh = self.leaves[name], Mesh()
        leaf = LeafLayout(kind, key, info.shape, info.dtype, (Piece(P()),))
        full = torch.empty(info.shape, dtype=info.dtype, device="cpu")
        self.read(plan_restore(self.plan, [leaf], mesh).rank(0), lambda _: full)
        return full

    def differences(self, other: Checkpoint) -> list[str]:
        """Return how another checkpoint differs, one line per leaf that differs. It reads both."""
        mine, theirs = self.leaves | self.numbers, other.leaves | other.numbers
        lines = [f"{name}: only in {self.path}" for name in mine if name not in theirs]
        lines += [f"{name}: only in {other.path}" for name in theirs if name not in mine]
        for name, leaf in mine.items():
            its = theirs.get(name, leaf)
            if its != leaf:
                lines.append(f"{name}: {_shown(leaf)} and {_shown(its)}")
            elif name in theirs and isinstance(leaf, LeafInfo):
                a, b = self.tensor(name), other.tensor(name)
                wrong = int((a.view(-1) != b.view(-1)).sum())
                if wrong:
                    far = float((a.double() - b.double()).abs().max()) if a.is_floating_point() else float("nan")
                    lines.append(f"{name}: {wrong:,} of {a.numel():,} elements differ, by at most {far:.3g}")
        return lines

    def open(self, name: str) -> ShardFile:
        return ShardFile(self.path / name, self.files[name], self.body["sums"])

    def fill(self, items: RestorePlan, shards: Mapping[tuple[int, int], torch.Tensor]) -> None:
        fill_shards(items, shards, self.read)

    def read(self, items: Iterable[ReadItem], held: Callable[[int], torch.Tensor], rank: int = 0) -> None:
        """Read boxes into held tensors, by their indices. Each file is read once, from its beginning to its end."""
        work: dict[str, list[tuple[ReadItem, Box, Box]]] = defaultdict(list)
        for item in items:
            for source, common in item.sources:
                name = self._name(item.leaf.kind, source.rank, source.number)
                work[name].append((item, source.box, common))
        # ranks begin with different files, in pairs: another rank has just read the second one from the disk
        names, first = sorted(work), rank % self.mesh.size * len(work) // self.mesh.size
        names = names[first:] + names[:first]
        for pair in (names[index : index + 2] for index in range(0, len(names), 2)):
            with self._reading(), ExitStack() as files:
                jobs = []
                for order, name in enumerate(pair):
                    file = files.enter_context(self.open(name))
                    for item, box, common in work[name]:
                        entry = file.entries.get(item.leaf.key)
                        if entry is None or entry.box != box:
                            raise DamagedCheckpointError(
                                f"{file.path}: it does not have the box of {item.leaf} at {box.start}"
                            )
                        jobs.append((entry.begin, order, common.start, file, item, entry, common))
                for _, _, _, file, item, entry, common in sorted(jobs, key=lambda job: job[:3]):
                    target = item.part.view(held(item.part.held))
                    file.read(entry, common, target[common.within(item.part.box).slices])

    def _name(self, kind: str, rank: int, number: int) -> str:
        name = self._names.get((kind, rank, number))
        if name is None:
            raise DamagedCheckpointError(
                f"{self.path / NAME}: it does not name file {number + 1} of rank {rank}, {kind}"
            )
        return name

    @cached_property
    def _names(self) -> dict[tuple[str, int, int], str]:
        found = {}
        for name in self.files:
            kind, _, rest = name.partition("/")
            _, rank, _, number, _, _ = rest.removesuffix(".safetensors").split("-")
            found[kind, int(rank) - 1, int(number) - 1] = name
        return found


def fill_shards(
    items: RestorePlan,
    shards: Mapping[tuple[int, int], torch.Tensor],
    read: Callable[[Sequence[ReadItem], Callable[[int], torch.Tensor], int], None],
) -> None:
    """Fill shards, by the index of the held tensor and the rank. `read` reads the items of a rank into its tensors."""
    for rank in {rank: None for _, rank in shards}:
        mine = [item for item in items.rank(rank) if (item.part.held, rank) in shards]
        covered = Counter[int]()
        for item in mine:
            covered[item.part.held] += sum(common.numel for _, common in item.sources)
        for (index, owner), shard in shards.items():
            if owner == rank and covered[index] < shard.numel():
                shard.zero_()  # padding, and what a larger shape adds
        read(mine, lambda held, rank=rank: shards[held, rank], rank)  # type: ignore[misc]


def _shown(leaf: LeafInfo | bool | int | float) -> str:
    return f"{leaf.shape} {leaf.dtype}" if isinstance(leaf, LeafInfo) else repr(leaf)
