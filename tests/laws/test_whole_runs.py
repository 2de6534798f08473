"""A run is that of one rank: any model, any plan, changed half way through; simulated, and on gloo processes.

Everything at once: schedules, ZeRO, tensor and sequence parallelism, accumulation, recomputation, buckets, clipping,
dropout, masks, tied weights, and a state that is read under one plan and loaded under another.
"""

from __future__ import annotations

import math
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import functional_parallel as fp

from ..processes import run_on_processes
from .random_models import Model, models
from .random_plans import Choice, choices

OPTIMIZERS = {
    "momentum": fp.optim.sgd(0.1, momentum=0.9, weight_decay=0.01),
    "adamw": fp.optim.adamw(1e-2),
}
ONE = Choice((("one", 1),), (0, {}), None, 1, "once", None, None)

Run = tuple[Model, Choice, Choice, str, float | None]


def runs(ranks: int | None = None, most: int = 6) -> st.SearchStrategy[Run]:
    """A model of at most so many layers, plans of both halves of its training, an optimizer, a norm to clip to."""
    return models(most).flatmap(
        lambda model: st.tuples(
            st.just(model),
            choices(model, ranks),
            choices(model, ranks),
            st.sampled_from(sorted(OPTIMIZERS)),
            st.sampled_from([None, 0.5]),
        )
    )


def trained(
    model: Model, plans: tuple[Choice, ...], optimizer: str, clip: float | None, samples: int
) -> tuple[list[Any], Any]:
    """The metrics of four steps, what every second state is worth, and parameters and optimizer state after them."""
    found, whole = [], None
    for half, choice in enumerate(plans):
        if choice not in plans[:half]:
            train = fp.train_step(
                model,
                OPTIMIZERS[optimizer],
                choice.mesh,
                choice.plan(model),
                clip=clip,
                bucket=choice.bucket,
                has_aux=True,
                seed=model.seed,
            )
            evaluate = train.compile(choice.plan(model)(keyed(model)))
        state = train.init(model.parameters()) if whole is None else train.load(*whole, step=2 * half)
        for step in (0, 1):
            state, metrics = train(state, model.batch(2 * half + step, samples))
            found.append((metrics.loss, metrics.aux, metrics.grad_norm if clip else None))
        found.append(evaluate(state, model.batch(4, samples)))
        whole = train.whole(state)
    return found, whole


def keyed(model: Model) -> Any:
    """The model outside of a step, which gives it no key."""

    def evaluated(params: Any, batch: Any) -> Any:
        with fp.random.using(fp.random.key(5)):
            return model(params, batch)

    return evaluated


def results(run: Run, *plans: Choice) -> tuple[list[Any], Any]:
    """What comes of a run by its own plans, or by others."""
    model, first, second, optimizer, clip = run
    samples = math.lcm(*(choice.microbatches * dict(choice.sizes).get("data", 1) for choice in (first, second)))
    return trained(model, plans or (first, second), optimizer, clip, samples)


def check(run: Run) -> None:
    assert_close(results(run), results(run, ONE, ONE))


def assert_close(found: Any, wanted: Any) -> None:
    for path, a, b in zip(optree.tree_paths(found), optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, path=path: f"{path}: {text}")


@settings(max_examples=4)
@given(runs(most=4))
def test_a_run_is_that_of_one_rank(run: Run) -> None:
    check(run)


@pytest.mark.slow
@settings(max_examples=250)
@given(runs())
def test_many_runs_are_those_of_one_rank(run: Run) -> None:
    check(run)


def results_of(rank: int, sample: list[Run]) -> list[Any]:
    return [results(run) for run in sample]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sample_on_processes(ranks: int) -> None:
    sample: list[Run] = []

    @settings(max_examples=3, phases=[Phase.generate])
    @given(runs(ranks, most=4))
    def draw(run: Run) -> None:
        sample.append(run)

    draw()
    wanted = [results(run, ONE, ONE) for run in sample]
    for found in run_on_processes(results_of, ranks, sample, timeout=240):
        assert_close(found, wanted)
