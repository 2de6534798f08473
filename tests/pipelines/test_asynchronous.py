"""Asynchronous schedules do exactly what their papers say, replayed in one process with stale weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel import schedules
from functional_parallel.errors import PipelineError
from functional_parallel.schedules import Action
from sharding_specs import Mesh

from ..processes import run_on_processes

LR = 0.5


def network(depth: int) -> Callable[..., torch.Tensor]:
    def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for stage, weight in enumerate(params):
            x = fp.stage_boundary(x) if stage else x
            x = torch.tanh(x @ weight)
        return (x**2).mean()

    return loss


def drawn(depth: int, samples: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [draw(3, 3) for _ in range(depth)], draw(samples, 3)


def replayed(delays: list[int], params: list[torch.Tensor], batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """w_s^{t+1} = w_s^t − λ ∇_s f(w_0^{t−d_0}, w_1^{t−d_1}, …), written down as it reads."""
    history = [[weight] for weight in params]
    for t, batch in enumerate(batches):
        stale = [history[stage][max(0, t - delay)] for stage, delay in enumerate(delays)]
        grads = fp.grad(network(len(params)))(stale, batch)
        for stage, grad in enumerate(grads):
            history[stage].append(history[stage][-1] - LR * grad)
    return [versions[-1] for versions in history]


def trained(schedule: Any, depth: int, microbatches: int, params: Any, x: torch.Tensor) -> tuple[Any, Any]:
    plan = fp.pipeline("pipe", schedule=schedule, microbatches=microbatches)
    train = fp.train_step(network(depth), fp.optim.sgd(LR), Mesh(pipe=depth), plan)
    state, metrics = train(train.init(params), x)
    return train.params(state), (metrics, train.program)


@settings(max_examples=20)
@given(st.integers(1, 4), st.integers(1, 8), st.booleans(), st.integers(0, 100))
def test_weight_stashing_and_vertical_sync(depth: int, microbatches: int, vertical: bool, seed: int) -> None:
    """Stage s of n uses weights n − 1 − s versions old, with vertical sync n − 1 (PipeDream, section 3.3)."""
    params, x = drawn(depth, 2 * microbatches, seed)
    schedule = schedules.pipedream(depth, microbatches, vertical_sync=vertical)
    got, (metrics, program) = trained(schedule, depth, microbatches, params, x)
    delays = [depth - 1 if vertical else depth - 1 - stage for stage in range(depth)]
    for a, b in zip(got, replayed(delays, params, list(x.chunk(microbatches))), strict=True):
        assert torch.equal(a, b)
    assert metrics.grad_norm is None
    assert tuple(program.cache["most versions"].values()) == schedules.kept_versions(schedule)


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 100))
def test_double_buffering(depth: int, batches: int, seed: int) -> None:
    """W^{t+1} = W^t − λ ∇f(W^{t−1}) on every stage, two versions kept (PipeDream-2BW, section 3.1)."""
    params, x = drawn(depth, 2 * depth * batches, seed)
    got, (_, program) = trained("2bw", depth, depth * batches, params, x)
    wanted = replayed([1] * depth, params, list(x.chunk(batches)))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-14, atol=1e-14)  # a batch is summed in microbatches
    assert max(program.cache["most versions"].values()) <= 2


def test_with_data_parallel_and_adamw() -> None:
    """Beside another axis: the same as without it."""
    params, x = drawn(2, 16, 0)
    pipe = fp.pipeline("pipe", schedule="pipedream", microbatches=4)
    results = []
    for plan, mesh in [
        (pipe, Mesh(pipe=2)),
        (fp.chain(fp.zero(1, "data"), pipe), Mesh(pipe=2, data=2)),
    ]:
        train = fp.train_step(network(2), fp.optim.adamw(1e-2), mesh, plan)
        # Four microbatches of four samples: a data rank has two of each, so its samples stand together.
        own = x if "data" not in mesh.axis_names else x.view(4, 2, 2, 3).transpose(0, 1).reshape(16, 3)
        state, _ = train(train.init(params), own)
        results.append(train.params(state))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def on_process(rank: int) -> list[torch.Tensor]:
    params, x = drawn(2, 12, 0)
    return trained("pipedream", 2, 6, params, x)[0]


def test_on_processes() -> None:
    wanted = on_process(0)
    for found in run_on_processes(on_process, 2):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_needs_all_stages_is_refused() -> None:
    params, x = drawn(2, 8, 0)
    plan = fp.pipeline("pipe", schedule="pipedream", microbatches=4)
    clipped = fp.train_step(network(2), fp.optim.sgd(LR), Mesh(pipe=2), plan, clip=1.0)
    with pytest.raises(PipelineError, match="global gradient norm"):
        clipped(clipped.init(params), x)
    with pytest.raises(PipelineError, match=r"use it in fp\.train_step only; .* to evaluate, take a synchronous"):
        fp.compile(fp.grad(plan(network(2))), Mesh(pipe=2))
    train = fp.train_step(network(2), fp.optim.sgd(LR), Mesh(pipe=2), plan)
    with pytest.raises(ValueError, match="7 samples"):
        train(train.init(params), x[:7])


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (lambda x: {"each": x.mean(1)}, "'1/2/each' has a value per sample"),
        (lambda x: {"right": (x > 0).sum()}, "'1/2/right' is of torch.int64, which has no mean"),
        (lambda x: {"mean": x.mean(), "name": "x"}, None),
    ],
)
def test_what_has_no_mean_over_updates_is_refused(report: Callable[..., Any], why: str | None) -> None:
    def loss(params: list[torch.Tensor], x: torch.Tensor) -> Any:
        x = torch.tanh(fp.stage_boundary(torch.tanh(x @ params[0])) @ params[1])
        return (x**2).mean(), report(x)

    params, x = drawn(2, 8, 0)
    plan = fp.pipeline("pipe", schedule="pipedream", microbatches=4)
    train = fp.train_step(loss, fp.optim.adamw(0.0), Mesh(pipe=2), plan, has_aux=True)
    if why is None:
        wanted = loss(params, x)[1]["mean"]
        aux = train(train.init(params), x)[1].aux
        torch.testing.assert_close(aux["mean"], wanted)
        assert aux["name"] == "x"
        return
    with pytest.raises(PipelineError, match=rf"test_asynchronous.*{why}: return a floating mean"):
        train(train.init(params), x)


def test_versions_are_actions_of_the_schedule() -> None:
    schedule = schedules.pipedream(2, 4)
    assert schedule.versions is not None
    assert schedule.versions.reads[Action("F", 0, 3)] == 2
