"""Readers of a folder in which a run saves and removes: they read the newest checkpoint, and never call one damaged."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.checkpoint.files import ShardFile
from functional_parallel.checkpoint.opened import Checkpoint
from functional_parallel.errors import CheckpointError, DamagedCheckpointError, RemovedCheckpointError

from ..processes import run_on_processes
from .small import PARAMS, small_step

STEP = 3  # of the first checkpoint
SAVES = 12
STAGES = {"chosen": (Checkpoint, "__init__"), "opened": (Checkpoint, "read"), "reading": (ShardFile, "__init__")}


def state_of(train: Any, step: int) -> Any:
    """A state whose parameters are the number of its step."""
    params = {key: torch.full_like(leaf, step) for key, leaf in PARAMS.items()}
    return train.load(params, train.optimizer.init(params), step)


def saved(train: Any, folder: Path, step: int, keep: int = 1) -> None:
    saver = fp.checkpoint.Saver(folder, keep=keep, asynchronous=False)
    saver(train, state_of(train, step))


@pytest.fixture(scope="module")
def train() -> Any:
    return small_step()


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs something, once, at a stage of the next read: after it was chosen, after it was opened, or between files."""

    def at(stage: str, act: Callable[[], None], number: int = 0) -> None:
        owner, name = STAGES[stage]
        before, calls = getattr(owner, name), itertools.count()

        def patched(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == number:
                act()
            return before(*args, **kwargs)

        monkeypatch.setattr(owner, name, patched)

    yield at
    monkeypatch.undo()


READS: dict[str, Callable[[Any, Path], int]] = {
    "load": lambda train, folder: int(fp.checkpoint.load(folder)["w"][0, 0]),
    "restore": lambda train, folder: int(train.params(train.restore(folder))["w"][0, 0]),
    "inspect": lambda train, folder: fp.checkpoint.inspect(folder).step,
    "consolidate": lambda train, folder: _consolidated(folder),
}


def _consolidated(folder: Path) -> int:
    fp.checkpoint.consolidate(folder, folder / "full")
    return int(fp.checkpoint.load(folder / "full" / "model.safetensors")["w"][0, 0])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("read", READS)
def test_a_reader_takes_the_newest_again(
    train: Any, tmp_path: Path, read: str, stage: str, meanwhile: Callable[..., None]
) -> None:
    saved(train, tmp_path, STEP)
    saved_again = []
    number = 3 if (read, stage) == ("consolidate", "opened") else 0  # then the parameters are already written
    meanwhile(stage, lambda: saved_again.append(saved(train, tmp_path, STEP + 1)), number)
    expected = STEP if read == "inspect" and stage != "chosen" else STEP + 1
    assert READS[read](train, tmp_path) == expected
    assert len(saved_again) == (0 if expected == STEP else 1)


@pytest.mark.parametrize("stage", STAGES)
def test_one_that_is_replaced_is_read_again(train: Any, tmp_path: Path, stage: str, meanwhile: Any) -> None:
    """Its new files have other contents, and the sizes of the old ones."""
    saved(train, tmp_path, STEP)
    other = state_of(train, STEP + 1)

    def replaced() -> None:
        train.save(train.load(train.params(other), train.optimizer.init(PARAMS), STEP), tmp_path)

    meanwhile(stage, replaced)
    assert int(fp.checkpoint.load(tmp_path / f"step_{STEP:08d}")["w"][0, 0]) == STEP + 1


@pytest.mark.parametrize("stage", STAGES)
def test_a_given_step_that_was_removed_is_not_called_damaged(
    train: Any, tmp_path: Path, stage: str, meanwhile: Any
) -> None:
    saved(train, tmp_path, STEP)
    meanwhile(stage, lambda: saved(train, tmp_path, STEP + 1))
    gone = rf"step_{STEP:08d}: it was removed or replaced while it was read; a Saver with keep="
    with pytest.raises(RemovedCheckpointError, match=gone):
        train.restore(tmp_path, step=STEP)
    with pytest.raises(CheckpointError, match=rf"no checkpoint of step {STEP}; it has steps 4; a Saver with"):
        train.restore(tmp_path, step=STEP)
    with pytest.raises(
        CheckpointError, match=rf"step_{STEP:08d}: there is no checkpoint; no such folder; a Saver with"
    ):
        fp.checkpoint.load(tmp_path / f"step_{STEP:08d}")


def test_an_opened_checkpoint_says_that_it_was_removed(train: Any, tmp_path: Path) -> None:
    saved(train, tmp_path, STEP)
    info = fp.checkpoint.inspect(tmp_path)
    saved(train, tmp_path, STEP + 1)
    for read in (info.verify, lambda: info.tensor("params/w")):
        with pytest.raises(RemovedCheckpointError, match="it was removed or replaced"):
            read()


def test_a_missing_file_is_damage(train: Any, tmp_path: Path, meanwhile: Any) -> None:
    saved(train, tmp_path, STEP)
    file = next(tmp_path.rglob("params/*"))
    meanwhile("opened", file.unlink)
    with pytest.raises(DamagedCheckpointError, match=f"{file.name}: No such file"):
        fp.checkpoint.load(tmp_path)
    (tmp_path / f"step_{STEP:08d}" / "checkpoint.json").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"checkpoint.json: No such file"):
        fp.checkpoint.load(tmp_path)


def test_a_reader_that_is_always_too_late_is_told(train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(train, tmp_path, STEP)
    steps, before = itertools.count(STEP + 1), Checkpoint.read

    def read(*args: Any, **kwargs: Any) -> None:
        made = tmp_path / f"step_{next(steps):08d}"
        next(tmp_path.glob("step_*")).rename(made)
        before(*args, **kwargs)

    monkeypatch.setattr(Checkpoint, "read", read)
    for each in (fp.checkpoint.load, train.restore):
        with pytest.raises(RemovedCheckpointError, match=r"100 times in a row.* give its Saver a larger keep"):
            each(tmp_path)


# --- a saver and readers at the same time ---


def _reads(folder: Path, saves: threading.Thread, problems: list[str], counts: list[int]) -> None:
    train, count = small_step(), 0
    try:
        while saves.is_alive() or not count:
            params = fp.checkpoint.load(folder)
            step = fp.checkpoint.inspect(folder).step
            state = train.restore(folder)
            assert params["w"].unique().tolist() == params["b"].unique().tolist()
            assert params["w"][0, 0] <= step <= state.step
            assert train.params(state)["w"].unique().tolist() == [state.step]
            count += 1
    except Exception as error:
        problems.append(f"{type(error).__name__}: {error}")
    counts.append(count)


@pytest.mark.parametrize("keep", [1, 2])
def test_a_saver_and_readers_at_the_same_time(train: Any, tmp_path: Path, keep: int) -> None:
    problems, counts = list[str](), list[int]()
    saved(train, tmp_path, 0, keep)

    def saves() -> None:
        with fp.checkpoint.Saver(tmp_path, keep=keep) as saver:
            for step in range(1, SAVES):
                saver(train, state_of(train, step))

    saving = threading.Thread(target=saves)
    readers = [threading.Thread(target=_reads, args=(tmp_path, saving, problems, counts)) for _ in range(3)]
    for each in (saving, *readers):
        each.start()
    for each in (saving, *readers):
        each.join()
    assert problems == [] and len(counts) == 3 and min(counts) > 0
    assert fp.checkpoint.inspect(tmp_path).step == SAVES - 1 and len(list(tmp_path.glob("step_*"))) == keep


# --- on processes ---


def on_a_rank(rank: int, folder: str, stage: str) -> tuple[int, float]:
    train = small_step(reduction="ordered")
    for step in (STEP, STEP + 1):
        train.save(state_of(train, step), folder)
    newer, gone = Path(folder) / f"step_{STEP + 1:08d}", Path(folder) / f"step_{STEP:08d}"
    if rank == 0:
        newer.rename(newer.with_suffix(".later"))
    torch.distributed.barrier()
    owner, name = STAGES[stage]
    before, calls = getattr(owner, name), itertools.count()

    def patched(*args: Any, **kwargs: Any) -> Any:
        if rank == 1 and next(calls) == 0:  # the other rank may have read it
            newer.with_suffix(".later").rename(newer)
            gone.rename(gone.with_suffix(".gone-x"))
        return before(*args, **kwargs)

    setattr(owner, name, patched)
    try:
        state = train.restore(folder)
    finally:
        setattr(owner, name, before)
    return state.step, float(train.params(state)["w"].mean())


@pytest.mark.parametrize("stage", ["chosen", "opened"])
def test_all_ranks_restore_the_same_checkpoint(tmp_path: Path, stage: str) -> None:
    assert run_on_processes(on_a_rank, 2, str(tmp_path), stage) == [(STEP + 1, STEP + 1.0)] * 2
