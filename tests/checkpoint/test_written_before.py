"""Checkpoints that an older version wrote are read, bit for bit."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp

from .runs import PLANS, train_of
from .written import ARCHIVE, RUNS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("written")
    with tarfile.open(ARCHIVE) as file:
        file.extractall(folder, filter="data")
    return folder


def same_leaves(found: Any, expected: Any) -> bool:
    pairs = zip(optree.tree_leaves(found), expected, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize("name", RUNS)
def test_it_is_restored(name: str, folder: Path) -> None:
    train, _, batch, _, restore = RUNS[name]()
    fp.checkpoint.inspect(folder / name / "saved").verify()
    state = train.restore(folder / name / "saved", **restore)
    assert state.step == 1
    assert same_leaves(train.whole(state), torch.load(folder / name / "expected.pt", weights_only=True))
    train(state, batch)


@pytest.mark.parametrize("name", PLANS)
def test_it_is_restored_onto_another_plan(name: str, folder: Path) -> None:
    train = train_of("zero 3, padded")
    state = train.restore(folder / name / "saved")
    params = train.params(state)
    expected = torch.load(folder / name / "expected.pt", weights_only=True)
    assert same_leaves(params, expected[: len(optree.tree_leaves(params))])
