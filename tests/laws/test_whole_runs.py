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
from functional_parallel.runtime import SimulatedRuntime, use_runtime
from sharding_specs import Mesh

from ..processes import run_on_processes
from .random_models import Model, models
from .random_plans import Choice, choices

OPTIMIZERS = {
    "momentum": fp.optim.sgd(0.1, momentum=0.9, weight_decay=0.01),
    "adamw": fp.optim.adamw(1e-2),
}
ONE = Choice((("one", 1),), (0, {}), None, 1, "once", None, None)

Run = tuple[Model, Choice, Choice, str, float | None]


def runs(ranks: int | None = None) -> st.SearchStrategy[Run]:
    """A model, the plans of both halves of its training, an optimizer, and the norm to clip gradients to."""
    return models().flatmap(
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
        state = train.init(model.parameters()) if whole is None else train.load(*whole, step=2 * half)
        for step in (0, 1):
            state, metrics = train(state, model.batch(2 * half + step, samples))
            found.append((metrics.loss, metrics.aux, metrics.grad_norm if clip else None))
        evaluate = train.compile(choice.plan(model)(keyed(model)))
        found.append(evaluate(state, model.batch(4, samples)))
        whole = train.whole(state)
    return found, whole


def keyed(model: Model) -> Any:
    """The model outside of a step, which gives it no key."""

    def evaluated(params: Any, batch: Any) -> Any:
        with fp.random.using(fp.random.key(5)):
            return model(params, batch)

    return evaluated


def check(run: Run) -> None:
    model, first, second, optimizer, clip = run
    samples = math.lcm(*(choice.microbatches * dict(choice.sizes).get("data", 1) for choice in (first, second)))
    found = trained(model, (first, second), optimizer, clip, samples)
    wanted = trained(model, (ONE, ONE), optimizer, clip, samples)
    for path, a, b in zip(optree.tree_paths(found), optree.tree_leaves(found), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda text, path=path: f"{path}: {text}")


@settings(max_examples=5)
@given(runs())
def test_a_run_is_that_of_one_rank(run: Run) -> None:
    check(run)


@pytest.mark.slow
@settings(max_examples=250)
@given(runs())
def test_many_runs_are_those_of_one_rank(run: Run) -> None:
    check(run)


def check_all(rank: int, sample: list[Run]) -> int:
    use_runtime(SimulatedRuntime(Mesh(one=1)))  # every process has a run of one rank to compare with
    for run in sample:
        check(run)
    return len(sample)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_sample_on_processes(ranks: int) -> None:
    sample: list[Run] = []

    @settings(max_examples=3, phases=[Phase.generate])
    @given(runs(ranks))
    def draw(run: Run) -> None:
        sample.append(run)

    draw()
    assert run_on_processes(check_all, ranks, sample, timeout=240) == [len(sample)] * ranks
