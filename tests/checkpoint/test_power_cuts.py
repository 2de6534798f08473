"""Power cuts after every operation on the file system: a reader finds complete checkpoints, and loses none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.checkpoint import saving
from functional_parallel.checkpoint.folder import committed
from functional_parallel.errors import CheckpointError

from .lossy import CarelessDisk, LossyDisk, PowerCut
from .small import PARAMS, small_step


@pytest.fixture(scope="module")
def train() -> Any:
    return small_step(donate=False)


@pytest.fixture(scope="module")
def states(train: Any) -> list[Any]:
    found = [train.init(PARAMS)]
    for _ in range(2):
        found.append(train(found[-1], torch.ones(2, 4))[0])
    return found


SCENARIOS = {  # steps to save, and how many to keep
    "two steps": ([1, 2], None),
    "the first is removed": ([1, 2], 1),
    "a step again": ([1, 2, 1], None),
    "a step again, and one is removed": ([1, 2, 2], 1),
}


def saves(train: Any, states: list[Any], folder: Path, disk: Any, scenario: str, monkeypatch: Any) -> list[int]:
    """Run a scenario, and return the steps that were saved before it ended."""
    monkeypatch.setattr(saving, "Disk", lambda: disk)
    steps, keep = SCENARIOS[scenario]
    done: list[int] = []
    try:
        for step in steps:
            save = train.begin_save(states[step], folder, keep=keep)
            save.run()
            save.wait()
            done.append(step)
    except PowerCut:
        pass
    monkeypatch.undo()
    return done


def broken(train: Any, states: list[Any], folder: Path, done: list[int], keep: int | None) -> str:
    """What is wrong with a folder after a cut; empty if nothing."""
    try:
        held = [fp.checkpoint.inspect(each) for each in committed(folder)]
        for info in held:
            info.verify()
    except CheckpointError as error:
        return str(error)
    steps = {info.step for info in held}
    wanted = set(done if keep is None else done[-keep:])
    if not wanted <= steps and not (keep and steps and max(steps) > max(wanted)):
        return f"steps {sorted(wanted - steps)} are lost"
    for step in steps:
        if not torch.equal(train.params(train.restore(folder, step=step))["w"], train.params(states[step])["w"]):
            return f"step {step} has other values"
    return ""


def cuts(
    kind: type[LossyDisk], train: Any, states: list[Any], root: Path, scenario: str, monkeypatch: Any
) -> tuple[int, list[str]]:
    """The number of operations, and what is wrong after a cut before each."""
    found: list[str] = []
    stop = 0
    while True:
        folder = root / f"run{stop}"
        folder.mkdir()
        disk = kind(folder, stop)
        done = saves(train, states, folder, disk, scenario, monkeypatch)
        for after in disk.survivors(root / f"cut{stop}", stop):
            if problem := broken(train, states, after, done, SCENARIOS[scenario][1]):
                found.append(f"before operation {stop}: {problem}")
        if done == SCENARIOS[scenario][0]:
            return stop, found
        stop += 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_cut_breaks_or_loses_a_checkpoint(
    scenario: str, train: Any, states: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations, found = cuts(LossyDisk, train, states, tmp_path, scenario, monkeypatch)
    assert operations > 40
    assert not found


def test_without_syncs_cuts_are_noticed(
    train: Any, states: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = cuts(CarelessDisk, train, states, tmp_path, "two steps", monkeypatch)
    assert len(found) > 5


def test_a_run_goes_on_after_any_cut(
    train: Any, states: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stop in range(0, 60, 4):
        folder = tmp_path / f"run{stop}"
        folder.mkdir()
        disk = LossyDisk(folder, stop)
        saves(train, states, folder, disk, "a step again, and one is removed", monkeypatch)
        for after in disk.survivors(tmp_path / f"cut{stop}", stop):
            train.save(states[2], after)
            fp.checkpoint.inspect(after).verify()
            assert sorted(each.name for each in after.iterdir() if each.name.startswith("step_"))[-1] == "step_00000002"
            assert not [each for each in after.iterdir() if "tmp" in each.name or "gone" in each.name]
