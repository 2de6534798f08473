"""Nothing grows faster than the program: the calls of each function, counted at several depths, phase by phase."""

from __future__ import annotations

import cProfile
import functools
import itertools
import pstats
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import functional_parallel as fp
from functional_parallel.ir import repeats
from functional_parallel.passes.lifetimes import Lifetimes, MemoryCurve
from sharding_specs import Mesh, P

from .passes.networks import SPLIT, batch, loss, parameters

Calls = Counter[str]

MOST = 2.2  # times as many calls at twice the depth
FEW = 700  # calls; below, the calls of the first and last layers count too much

GRID, ROW = Mesh(data=2, tensor=2), Mesh(data=2)
TENSOR = fp.tensor_parallel("tensor", SPLIT)
PLANS: dict[str, tuple[Mesh, Any, dict[str, Any]]] = {
    "tensor and zero 3": (GRID, fp.chain(TENSOR, fp.zero(3, "data")), {"clip": 1.0}),
    "zero 1 in buckets": (ROW, fp.zero(1, "data"), {"bucket": "auto"}),
    "zero 2": (ROW, fp.zero(2, "data"), {"clip": 1.0}),
    "zero 3 in buckets": (ROW, fp.zero(3, "data"), {"bucket": 1 << 12}),
    "remat and bf16": (ROW, fp.chain(fp.remat(), fp.mixed_precision("bf16"), fp.zero(3, "data")), {}),
    "accumulate": (GRID, fp.chain(TENSOR, fp.zero(3, "data"), fp.accumulate(2)), {"clip": 1.0}),
}


@pytest.fixture(autouse=True)
def count_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each comparison of two nodes a call, so that a search in a list of nodes counts."""
    monkeypatch.setattr(fx.Node, "__eq__", lambda a, b: a is b, raising=False)
    monkeypatch.setattr(fx.Node, "__hash__", object.__hash__, raising=False)


def counted(f: Callable[[], Any]) -> tuple[Any, Calls]:
    profile = cProfile.Profile()
    profile.enable()
    try:
        result = f()
    finally:
        profile.disable()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    return result, Counter({f"{Path(file).name}:{line} {name}": each[1] for (file, line, name), each in stats.items()})


def phases(plan: str, layers: int) -> dict[str, Calls]:
    """Calls per phase; the first step includes its Python functions."""
    mesh, transform, options = PLANS[plan]
    train = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, transform, **options)
    params = parameters(layers, width=4)
    inputs = batch(8, width=4)
    state = train.init(params)
    program, lowered = counted(functools.partial(train.lower, state, *inputs))
    found = {"lower": lowered}
    for name, query in {
        "memory": program.memory,
        "price": lambda: str(program.price("h100")),
        "explain": lambda: str(program.explain()),
        "text": lambda: str(program),
        "step": lambda: train(state, *inputs),
    }.items():
        _, found[name] = counted(query)
    return found


def require_linear(measure: Callable[[int], dict[str, Calls]], depths: Sequence[int], most: float = MOST) -> None:
    measure(2)  # what is imported and cached once
    found = [measure(depth) for depth in depths]
    for less, more in itertools.pairwise(found):
        for phase, calls in more.items():
            grown = {name: (less[phase][name], count) for name, count in calls.items() if count > FEW}
            faster = {name: counts for name, counts in grown.items() if counts[1] > most * counts[0]}
            assert not faster, f"{phase}, from {sum(less[phase].values())} calls to {sum(calls.values())}: {faster}"


def test_a_step() -> None:
    require_linear(functools.partial(phases, "tensor and zero 3"), (8, 16))


def test_a_step_in_buckets() -> None:
    require_linear(functools.partial(phases, "zero 1 in buckets"), (8, 16))


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_a_deep_step(plan: str) -> None:
    require_linear(functools.partial(phases, plan), (12, 24, 48))


def calls_of_a_pipeline(layers: int) -> int:
    plan = fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", schedule="1f1b", microbatches=4))
    train = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(pipe=2, data=2), plan, clip=1.0)
    params, inputs = parameters(layers, width=4), batch(8, width=4)
    return sum(counted(lambda: train.lower(params, *inputs).price())[1].values())


@pytest.mark.slow
def test_a_deep_pipeline() -> None:
    calls_of_a_pipeline(2)  # what is imported and cached once
    few, more, most = map(calls_of_a_pipeline, (6, 12, 24))
    assert most - more < MOST * (more - few), (few, more, most)


def lifetimes(layers: int) -> dict[str, Calls]:
    """Calls of the lifetimes of a step, whose update has all new parameters as results."""
    train = fp.train_step(loss, fp.optim.adamw(1e-3), ROW, fp.zero(1, "data"), bucket="auto")
    program: Any = train.lower(train.init(parameters(layers, width=4)), *batch(8, width=4))
    return {"lifetimes": counted(lambda: MemoryCurve(Lifetimes(program.traced)).peak())[1]}


def test_lifetimes_of_merged_results() -> None:
    require_linear(lifetimes, (4, 8))


def remat_to_a_budget(layers: int) -> dict[str, Calls]:
    """Calls of the search for as little recomputation as fits, which has choices in each layer. Here none suffices."""
    step = fp.compile(fp.grad(fp.chain(fp.remat(budget=1), fp.data_parallel("data"))(loss)), ROW)

    def lower() -> None:
        with pytest.raises(fp.BudgetError):
            step.lower(parameters(layers), *batch(256))

    return {"budget": counted(lower)[1]}


def test_remat_to_a_budget() -> None:
    require_linear(remat_to_a_budget, (6, 12), most=MOST * 5 / 4)  # twice the choices take a fifth trial


def asking(layers: int) -> dict[str, Calls]:
    """Calls of a trace that asks for the strides of every layer."""

    def f(x: Tensor) -> Tensor:
        for _ in range(layers):
            x = torch.tanh(x)
            assert x.stride() == (2, 1)
        return x

    step = fp.compile(f, Mesh(), in_specs=P(), out_specs=P())
    return {"trace": counted(lambda: step.lower(torch.ones(4, 2)))[1]}


def test_questions_about_strides() -> None:
    require_linear(asking, (100, 200))


def searching(bodies: int) -> dict[str, Calls]:
    """Calls of the search for repeats in a sequence with two copies of each of many bodies."""
    tokens = [(body, index) for body in range(bodies) for _ in range(2) for index in range(10)]

    def search() -> list[repeats.Run]:
        return repeats.runs_of_repeats(tokens, [0] * len(tokens), 4, 7)

    runs, calls = counted(search)
    assert [(run.period, run.copies) for run in runs] == [(10, 2)] * bodies
    return {"search": calls}


def test_the_search_for_repeats() -> None:
    require_linear(searching, (50, 100, 200))
