"""Damaged checkpoints: each kind of damage is refused by the name of the file, and nothing is loaded."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.checkpoint.format import encode, header
from functional_parallel.errors import CheckpointError, DamagedCheckpointError
from sharding_specs import Box

from .small import PARAMS, small_step


@pytest.fixture(scope="module")
def train() -> Any:
    return small_step(donate=False)


@pytest.fixture(scope="module")
def run(train: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    state = train.init(PARAMS)
    train.save(state, folder)
    train.save(train(state, torch.ones(2, 4))[0], folder)
    return folder


@pytest.fixture
def folder(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run"


def _file(step: Path, number: int = 0) -> Path:
    return sorted(step.rglob("*.safetensors"))[number]


def _flip(path: Path, place: int) -> Path:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    return path


def _body(step: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Change the description, with a right checksum."""
    path = step / "checkpoint.json"
    body = json.loads(path.read_text())["checkpoint"]
    change(body)
    path.write_bytes(encode(body, body["sums"]))
    return path


def _cut(path: Path, size: int) -> Path:
    with path.open("r+b") as file:
        file.truncate(size)
    return path


def _remove(path: Path) -> Path:
    path.unlink()
    return path


def _mixed(step: Path) -> Path:
    """A file of another checkpoint, of the same size."""
    other = _file(step.with_name("step_00000000"), 3)
    target = step / other.relative_to(other.parents[1])
    shutil.copy(other, target)
    return target


def _other_header(step: Path) -> Path:
    """Another header of the same length, with its checksum."""
    path = _file(step, 2)
    data = path.read_bytes()
    length = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:length].replace(b'"w"', b'"v"') + data[length:])

    def change(body: dict[str, Any]) -> None:
        from functional_parallel.checkpoint.sums import hasher

        made = hasher(body["sums"])()
        made.update(path.read_bytes())
        body["files"][str(path.relative_to(step))][1] = [made.hexdigest()]

    _body(step, change)
    return path


DAMAGES: dict[str, Callable[[Path], Path]] = {
    "a bit of a tensor": lambda step: _flip(_file(step), -1),
    "a bit of a header": lambda step: _flip(_file(step), 20),
    "a bit of a header's length": lambda step: _flip(_file(step), 1),
    "a cut file": lambda step: _cut(_file(step), 40),
    "an empty file": lambda step: _cut(_file(step), 0),
    "a longer file": lambda step: _cut(_file(step), 10_000),
    "a missing file": lambda step: _remove(_file(step, 1)),
    "a file of another step": _mixed,
    "a bit of the description": lambda step: _flip(step / "checkpoint.json", 200),
    "a cut description": lambda step: _cut(step / "checkpoint.json", 300),
    "no description": lambda step: _remove(step / "checkpoint.json"),
    "a description of a later version": lambda step: _body(step, lambda body: body.update(version=99)),
    "boxes that do not cover a leaf": lambda step: _body(
        step, lambda body: body["leaves"]["params"]["w"]["pieces"][0].update(where={"data": [0]})
    ),
    "a file of other leaves": _other_header,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_by_name(damage: str, train: Any, folder: Path) -> None:
    path = DAMAGES[damage](folder / "step_00000001")
    with pytest.raises(DamagedCheckpointError) as caught:
        train.restore(folder)
    assert path.name in str(caught.value) or str(path.parent) in str(caught.value)
    assert "fallback=True takes step_00000000" in str(caught.value)
    with pytest.raises(CheckpointError):
        fp.checkpoint.inspect(folder).verify()
    with pytest.warns(RuntimeWarning, match="step_00000000 instead"):
        state = train.restore(folder, fallback=True)
    assert state.step == 0 and torch.equal(train.params(state)["w"], PARAMS["w"])


def test_when_all_are_damaged_the_oldest_is_named(train: Any, folder: Path) -> None:
    for step in folder.glob("step_*"):
        _flip(_file(step), -1)
    with pytest.warns(RuntimeWarning), pytest.raises(DamagedCheckpointError, match="step_00000000"):
        train.restore(folder, fallback=True)


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_fuzzed_files(count: int, train: Any, folder: Path) -> None:
    step, chance = folder / "step_00000001", random.Random(0)
    files = [each for each in sorted(step.rglob("*")) if each.is_file()]
    for _ in range(count):
        path = chance.choice(files)
        before = path.read_bytes()
        data = bytearray(before)
        kind = chance.randrange(4)
        if kind == 0:
            for _ in range(chance.randint(1, 8)):
                data[chance.randrange(len(data))] = chance.randrange(256)
        elif kind == 1:
            del data[chance.randrange(len(data)) :]
        elif kind == 2:
            begin = chance.randrange(len(data))
            data[begin:begin] = chance.randbytes(chance.randint(1, 40))
        else:
            begin = chance.randrange(len(data))
            data[begin : begin + 16] = chance.randbytes(len(data[begin : begin + 16]))
        if data == before:
            continue
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match=path.name):
            train.restore(step)
        path.write_bytes(before)
    assert train.restore(step).step == 1


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_fuzzed_headers_without_checksums(count: int, tmp_path: Path) -> None:
    """Files of other libraries have no checksums: a header is refused, or is one of tensors inside the file."""
    chance = random.Random(1)
    first = header([("w", torch.float32, Box((0, 0), (4, 3))), ("b", torch.int16, Box((0,), (3,)))])
    good = first + bytes(54)
    path = tmp_path / "model.safetensors"
    for _ in range(count):
        data = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            data[chance.randrange(len(first))] = chance.choice(b'0123456789[]{}",: abwFI')
        path.write_bytes(data)
        try:
            fp.checkpoint.load(path)
        except CheckpointError as error:
            assert path.name in str(error)
