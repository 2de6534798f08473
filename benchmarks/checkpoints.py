"""Time of saving and restoring a state on two processes, beside a plain write of the same bytes and torch's DCP.

    python benchmarks/checkpoints.py [--mebibytes 512] [--rounds 9] [--folder DIR] [--others]

Contestants take turns in the same processes. A time is that of the slower rank. It prints medians, and in brackets the
lowest and the highest time.

The checkpoint has matrices that two ranks hold by rows. It is restored onto a split of columns, and of columns and rows
in turn, as tensor parallelism has it: with checksums by `restore`, without by DCP's reader. "From disk" means that the
files are not in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import functional_parallel as fp
from sharding_specs import Mesh, P

ROWS, COLUMNS = 2048, 4096
STEPS = 12
RESTORE, READER = "restore", "DCP HuggingFaceStorageReader"
SPLITS = ("columns", "columns and rows")
DISK, CACHE = "from disk", "from the page cache"

Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=512, help="of the state, over both ranks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", help="on the disk to measure; a temporary one by default")
    parser.add_argument("--others", action="store_true", help="also the writer of safetensors in DCP, and torch.save")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        found = fp.launch(measured, 2, args.mebibytes, args.rounds, folder, args.others)[0]
    for name, times in found.items():
        low, middle, high = min(times), statistics.median(times), max(times)
        print(f"{name:62} {middle:7.3f} s  [{low:.3f} {high:.3f}]")
    median = {name: statistics.median(times) for name, times in found.items()}
    extra = {name: median[name] - median["steps"] for name in found if name.endswith("and steps")}
    for name, peer in (
        ("save", "plain write and fsync"),
        ("save", "DCP save"),
        *((f"{RESTORE} {split}, {where}", f"{READER} {split}, {where}") for where in (DISK, CACHE) for split in SPLITS),
    ):
        print(f"{name} ÷ {peer}: {median[name] / median[peer]:.2f}")
    print(
        f"extra time, asynchronous ÷ synchronous: {extra['asynchronous save and steps'] / extra['save and steps']:.2f}"
    )
    print(f"extra time, DCP async ÷ DCP: {extra['DCP async save and steps'] / extra['DCP save and steps']:.2f}")
    print(f"longest stall of an asynchronous save: {max(found['asynchronous save, stall']):.3f} s")


def measured(mebibytes: int, rounds: int, folder: str, others: bool) -> Times:
    warnings.simplefilter("ignore")
    return Bench(mebibytes, Path(folder)).times(rounds, others)


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w0"][:, :256]).square().mean()


class Bench:
    """The contestants on one rank."""

    def __init__(self, mebibytes: int, folder: Path) -> None:
        self.folder, count = folder, max(1, mebibytes * 2**20 // (ROWS * COLUMNS * 4))
        names = [f"w{index}" for index in range(count)]
        self.train = fp.train_step(loss, fp.optim.sgd(1e-3), Mesh(data=2), fp.zero(3, "data"))
        self.others = {
            each: fp.train_step(loss, fp.optim.sgd(1e-3), Mesh(tensor=2), fp.tensor_parallel("tensor", specs))
            for each, specs in zip(
                SPLITS,
                (
                    {"*": P(None, "tensor")},
                    {name: P("tensor") if i % 2 else P(None, "tensor") for i, name in enumerate(names)},
                ),
                strict=True,
            )
        }
        generator = torch.Generator().manual_seed(0)
        full = {name: torch.randn(ROWS, COLUMNS, generator=generator) for name in names}
        self.state = self.train.init(full)
        del full
        self.rank, self.x, self.mesh = fp.rank(), torch.ones(256, ROWS), init_device_mesh("cpu", (2,))
        shards = [handle for handle in self.state.handles if isinstance(handle, torch.Tensor) and handle.ndim == 2]
        self.parts = {name: shard.clone() for name, shard in zip(names, shards, strict=True)}
        self.by_rows = {name: DTensor.from_local(part, self.mesh, [Shard(0)]) for name, part in self.parts.items()}
        self.saver, self.stalls = fp.checkpoint.Saver(self.folder / "saver"), list[float]()

    def times(self, rounds: int, others: bool) -> Times:
        self.steps()
        self.train.save(self.state, self.folder / "kept")
        kept = self.folder / "kept" / f"step_{self.state.step:08d}" / "params"
        contestants: dict[str, Callable[[], None]] = {
            "plain write and fsync": self.plain,
            "save": self.save,
            "DCP save": self.dcp,
            **{
                f"{name} {split}, {where}": partial(run, split, path)
                for where in (DISK, CACHE)
                for split in self.others
                for name, run, path in (
                    (RESTORE, self.restore, self.folder / "kept"),
                    (READER, self.dcp_load, kept),
                )
            },
            "steps": self.steps,
            "save and steps": lambda: (self.save(), self.steps())[0],
            "asynchronous save and steps": self.asynchronous,
            "DCP save and steps": lambda: (self.dcp(), self.steps())[0],
            "DCP async save and steps": self.dcp_asynchronous,
        }
        if others:
            contestants["DCP HuggingFaceStorageWriter save"] = self.dcp_safetensors
            contestants["gather, torch.save and fsync"] = self.gathered
        found: Times = {name: [] for name in contestants}
        for number in range(rounds + 1):  # the first round warms up
            for place in range(len(contestants)):
                name = list(contestants)[(place + number) % len(contestants)]
                if name.endswith(DISK):
                    self.forget()
                found[name].append(self.time(contestants[name]))
                self.clean()
        found["asynchronous save, stall"] = self.stalls
        return {name: times[1:] for name, times in found.items()}

    def time(self, run: Callable[[], None]) -> float:
        dist.barrier()
        began = time.perf_counter()
        run()
        elapsed = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(elapsed, dist.ReduceOp.MAX)
        return float(elapsed)

    def clean(self) -> None:
        dist.barrier()
        if self.rank == 0:
            for each in self.folder.iterdir():
                if each.is_file():
                    each.unlink()
                elif each.name != "kept":
                    shutil.rmtree(each)
            os.sync()
        dist.barrier()

    def forget(self) -> None:
        """Drop the checkpoint from the page cache, as it is when another process restores it later."""
        if self.rank == 0:
            for each in (self.folder / "kept").rglob("*.safetensors"):
                descriptor = os.open(each, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)

    # --- contestants ---

    def plain(self) -> None:
        (self.folder / "plain").mkdir(exist_ok=True)
        with open(self.folder / "plain" / str(self.rank), "wb", buffering=0) as file:
            for part in self.parts.values():
                file.write(part.numpy())
            os.fsync(file.fileno())

    def save(self) -> None:
        self.train.save(self.state, self.folder / "ours")

    def asynchronous(self) -> None:
        began = time.perf_counter()
        self.saver(self.train, self.state)
        self.stalls.append(time.perf_counter() - began)
        self.steps()
        self.saver.wait()

    def restore(self, split: str, path: Path) -> None:
        self.others[split].restore(path)

    def steps(self) -> None:
        for _ in range(STEPS):
            self.state, _ = self.train(self.state, self.x)

    def dcp(self) -> None:
        dcp.save(self.by_rows, storage_writer=dcp.FileSystemWriter(self.folder / "dcp"))

    def dcp_safetensors(self) -> None:
        writer = dcp.HuggingFaceStorageWriter(str(self.folder / "hf"), save_distributed=True)
        dcp.save(self.by_rows, storage_writer=writer)

    def gathered(self) -> None:
        full = {name: part.full_tensor() for name, part in self.by_rows.items()}
        if self.rank == 0:
            with open(self.folder / "torch.pt", "wb") as file:
                torch.save(full, file)
                os.fsync(file.fileno())

    def dcp_asynchronous(self) -> None:
        future: Any = dcp.async_save(self.by_rows, storage_writer=dcp.FileSystemWriter(self.folder / "dcp"))
        self.steps()
        future.result()

    def dcp_load(self, split: str, path: Path) -> None:
        state = {}
        for number, name in enumerate(self.parts):
            dim = 0 if split != "columns" and number % 2 else 1
            part = torch.empty((ROWS // 2, COLUMNS) if dim == 0 else (ROWS, COLUMNS // 2))  # new, as restore has it
            state[name] = DTensor.from_local(part, self.mesh, [Shard(dim)])
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)))


if __name__ == "__main__":
    main()
