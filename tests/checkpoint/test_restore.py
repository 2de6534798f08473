"""A checkpoint is restored onto any mesh and plan, bit for bit, and the run goes on as the one that saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import functional_parallel as fp
from sharding_specs import Mesh

from ..processes import run_on_processes
from ..some_cases import one_in
from .runs import ALONE, BATCH, PARAMS, PLANS, loss, same, train_of, trained


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Any:
    folders: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("runs")
            train, state = trained(name)
            train.save(state, folders[name], extra={"plan": name})
            fp.checkpoint.inspect(folders[name]).verify()
        return folders[name]

    return of


@one_in(4, before=PLANS, after=PLANS)
def test_any_plan_to_any_other(before: str, after: str, saved: Any) -> None:
    train, state = trained(before)
    other = train_of(after)
    restored = other.restore(saved(before))
    assert restored.step == 1
    assert same(train.whole(state), other.whole(restored))


@pytest.mark.parametrize("name", [*PLANS, *ALONE])
def test_the_run_goes_on_with_the_same_bits(name: str, saved: Any) -> None:
    train, state = trained(name)
    expected, metrics = train(state, BATCH)
    other = train_of(name)
    got, others = other(other.restore(saved(name)), BATCH)
    assert metrics.loss is others.loss or torch.equal(metrics.loss, others.loss)
    assert same(train.whole(expected), other.whole(got))


def test_a_pipelines_rank_holds_only_its_stages_before_the_first_step(saved: Any) -> None:
    restored = train_of("pipeline of four").restore(saved("zero 1, flat"), batch="saved")
    assert {handle.holders for handle in restored.handles} >= {frozenset({rank}) for rank in range(4)}
    assert None not in {handle.holders for handle in restored.handles}


@pytest.mark.parametrize("name", ["zero 3, padded", "zero 1, flat"])
def test_padding_is_zero(name: str, tmp_path: Path) -> None:
    train = train_of(name)
    state = train.init(PARAMS)
    train.save(state, tmp_path)
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        restored = train.restore(tmp_path)
    finally:
        torch.use_deterministic_algorithms(False)
    shards = [x for held in state.handles if isinstance(held, list) for x in held]
    again = [x for held in restored.handles if isinstance(held, list) for x in held]
    assert len(shards) == len(again) and all(map(torch.equal, shards, again))


PAIRS = [("zero 3, padded", "zero 2"), ("flat", "pipeline"), ("pipeline", "zero 2"), ("masters", "flat")]
ON_TWO: dict[str, Any] = {
    "zero 3, padded": (Mesh(data=2), fp.zero(3, "data")),
    "zero 2": (Mesh(data=2), fp.zero(2, "data")),
    "flat": (Mesh(data=2), fp.zero(1, "data", layout="flat")),
    "masters": (Mesh(data=2), fp.chain(fp.mixed_precision("bf16"), fp.zero(1, "data"))),
    "pipeline": (PLANS["pipeline"][0], PLANS["pipeline"][1]),
}


def on_a_rank(rank: int, folder: str) -> list[bool]:
    steps = {}
    for name, (mesh, plan) in ON_TWO.items():
        train = fp.train_step(loss, fp.optim.adamw(0.01), mesh, plan, donate=False, reduction="ordered")
        state, _ = train(train.init(PARAMS), BATCH)
        train.save(state, Path(folder) / name)
        steps[name] = train, train.whole(state)
    found = []
    for before, after in PAIRS:
        train, expected = steps[after][0], steps[before][1]
        restored = train.restore(Path(folder) / before)
        found.append(same(expected, train.whole(restored)))
        restored, _ = train(restored, BATCH[:8])  # a batch of another shape than the saved run had
        train(restored, BATCH)
    return found


def test_processes(tmp_path: Path) -> None:
    assert run_on_processes(on_a_rank, 2, str(tmp_path)) == [[True] * len(PAIRS)] * 2
    for name, (mesh, plan) in ON_TWO.items():  # what processes wrote, simulated ranks read
        train = fp.train_step(loss, fp.optim.adamw(0.01), mesh, plan)
        assert train.restore(tmp_path / name).step == 1
