"""Checkpoints that an older version of the library wrote, with the values that it read from them.

`python -m tests.checkpoint.written FILE` writes such an archive with the present version. An archive in this folder is
never written anew: every later version reads it as it is.
"""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import optree
import torch
from torch import nn

import functional_parallel as fp
from sharding_specs import Mesh

from .runs import ALONE, BATCH, PARAMS, PLANS, train_of

__all__ = ["ARCHIVE", "RUNS", "Run"]

ARCHIVE = Path(__file__).with_name("version_1.tar.xz")


class Run(NamedTuple):
    """A training step, the parameters and the batch of a run, and how its checkpoints are saved and restored."""

    train: Any
    params: Any
    batch: torch.Tensor
    save: dict[str, Any]
    restore: dict[str, Any]


def with_buffers() -> Run:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    forward, params, buffers = fp.functional(module, buffers=True)

    def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        result, new = forward(params, buffers, x)
        return result.square().mean(), new

    train = fp.train_step(loss, fp.optim.adamw(0.01), Mesh(data=2), fp.zero(3, "data"), buffers=buffers)
    return Run(train, params, BATCH, {}, {})


def trained_only() -> Run:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (x @ p["base"] + x[:, :2] @ p["lora"]).square().mean()

    optimizer = fp.optim.by_path({"lora": fp.optim.adamw(0.1), "*": None})
    params = {"base": torch.arange(32.0).view(8, 4), "lora": torch.ones(2, 4)}
    train = fp.train_step(loss, optimizer, Mesh(data=2), fp.zero(3, "data"))
    return Run(train, params, BATCH, {"only": "trained"}, {"like": params})


RUNS: dict[str, Callable[[], Run]] = {
    **{name: lambda name=name: Run(train_of(name), PARAMS, BATCH, {}, {}) for name in [*PLANS, *ALONE]},
    "buffers": with_buffers,
    "trained only": trained_only,
}


def write(archive: Path) -> None:
    with TemporaryDirectory() as folder, tarfile.open(archive, "w:xz") as file:
        for name, make in RUNS.items():
            train, params, batch, save, restore = make()
            state, _ = train(train.init(params), batch)
            train.save(state, Path(folder, name, "saved"), **save)
            found = train.restore(Path(folder, name, "saved"), **restore)
            torch.save(optree.tree_leaves(train.whole(found)), Path(folder, name, "expected.pt"))
            file.add(Path(folder, name), name)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
