"""Offloading, compression, split activations, pipelines, accumulation, recomputation, precision and ZeRO, together.

A plan has the bits of the plan without what only moves, splits or recomputes values, and either goes on from a
checkpoint of the other. docs/memory_tiers.md has the table of all pairs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.optim import Optimizer
from sharding_specs import Mesh

from ..passes.networks import batch, loss, parameters
from .composed_memories import (
    PAGE,
    REFUSALS,
    ROUNDED,
    Chosen,
    completed,
    covering,
    is_accepted,
    mesh_of,
    pairs,
    plan_of,
    with_table,
)

KEEPS_BITS = ("offload", "partition_activations", "remat")
X, Y = batch(48)
ADAMW = fp.optim.adamw(1e-2)
ACCEPTED = [chosen for chosen in pairs() if is_accepted(chosen)]
REFUSED = [chosen for chosen in pairs() if not is_accepted(chosen)]
MANY = covering()
ALWAYS = 2  # of them run always


def without(chosen: Chosen) -> Chosen:
    """Leave out what keeps the bits."""
    plain = {feature: variant for feature, variant in chosen.items() if feature not in KEEPS_BITS}
    return plain if plain.get("compress") != "identity" else {**plain, "compress": ""}


def step(chosen: Chosen, optimizer: Optimizer, budget: int | None = None) -> Any:
    given = {feature: variant for feature, variant in chosen.items() if variant}
    return fp.train_step(loss, optimizer, mesh_of(chosen), plan_of(given, budget), clip=0.5)


def started(train: Any) -> Any:
    return train.init(optree.tree_map(torch.Tensor.float, parameters(4)))


def run(train: Any, state: Any, steps: int) -> Any:
    for _ in range(steps):
        state, metrics = train(state, X.float(), Y)
        assert not metrics.skipped
    return state, metrics


def bits(train: Any, result: Any) -> list[Any]:
    state, metrics = result
    return [*optree.tree_leaves(train.whole(state)), metrics.loss, metrics.grad_norm]


def is_same(a: list[Any], b: list[Any]) -> bool:
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a, b, strict=True))


def check(chosen: Chosen, folder: Path) -> None:
    chosen = completed(chosen)
    plain = step(without(chosen), ADAMW)
    first, _ = run(plain, started(plain), 1)
    plain.save(first, folder / "plain")
    wanted = bits(plain, run(plain, first, 2))
    if without(chosen) == chosen:  # it is its own reference, so that of one rank is another
        assert wanted[-2].item() == pytest.approx(loss_of_one_rank(), rel=0.1 if "compress" in chosen else 0.02)
    memory = plain.program.memory()
    peak = max(each.peak for each in getattr(memory, "ranks", [memory]))
    moved = step(chosen, ADAMW, budget=peak)
    first, _ = run(moved, started(moved), 1)
    moved.save(first, folder / "moved")
    assert is_same(bits(moved, run(moved, first, 2)), wanted)
    swapped = ((moved, "plain"), (plain, "moved"))
    resumed = [bits(train, run(train, train.restore(folder / saved), 2)) for train, saved in swapped]
    assert is_same(*resumed) and is_same(resumed[0], wanted) != ROUNDED.holds(chosen)


@cache
def loss_of_one_rank() -> float:
    train = fp.train_step(loss, ADAMW, Mesh(), clip=0.5)
    return run(train, started(train), 3)[1].loss.item()


def title(chosen: Chosen) -> str:
    return ", ".join(f"{feature} {variant}" for feature, variant in sorted(chosen.items()))


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text()
    assert text == with_table(text), "run python -m tests.laws.composed_memories"


def test_what_always_runs_has_every_two_features() -> None:
    always = [set(chosen) for chosen in MANY[:ALWAYS]]
    for chosen in ACCEPTED:
        assert any(set(chosen) <= features for features in always), chosen


@pytest.mark.parametrize("chosen", REFUSED, ids=title)
def test_a_pair_that_is_refused(chosen: Chosen) -> None:
    refusal = next(each for each in REFUSALS if each.holds(completed(chosen)))
    with pytest.raises(refusal.error, match=refusal.message):
        train = step(completed(chosen), ADAMW)
        train.lower(started(train), X.float(), Y)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ACCEPTED, ids=title)
def test_a_pair(chosen: Chosen, tmp_path: Path) -> None:
    check(chosen, tmp_path)


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (n >= ALWAYS)) for n in range(len(MANY))]
)
def test_many_at_once(number: int, tmp_path: Path) -> None:
    check(MANY[number], tmp_path)


def test_zeros_that_a_stage_reads_on_the_host_and_on_the_device() -> None:
    """Scales of quantised moments begin with zeros, which are computed once for all of one shape."""
    quantised = fp.optim.quantised(ADAMW, block=16, whole_below=32)
    train = step({"offload": "half of the state", "zero": "secondary", "pipeline": "gpipe"}, quantised)
    assert train.lower(started(train), X.float(), Y).memory().peaks["host"]
