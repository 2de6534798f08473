"""Microbatches that do not divide their batch, by every schedule and beside every other transform."""

from __future__ import annotations

from functools import partial
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.errors import PipelineError
from functional_parallel.schedules import Schedule
from sharding_specs import Mesh, P, SpecError

from ..passes.test_uneven_microbatches import LOSSES, arguments
from ..processes import run_on_processes
from ..trees import assert_equal
from .networks import SYNCHRONOUS, batch, kinds, made, network, parameters, pipeline, plans
from .test_asynchronous import drawn, replayed
from .test_asynchronous import network as tanh_network
from .test_laws import trained_both_ways
from .work import FOUR, four_ranks, uneven_on_two


@settings(max_examples=7)
@given(plans(), kinds, st.data(), st.integers(0, 1000))
def test_value_and_gradients_are_those_of_the_function(
    schedule: Schedule, contents: list[str], data: st.DataObject, seed: int
) -> None:
    contents = (contents * schedule.depth)[: max(schedule.depth, len(contents))]
    samples = data.draw(st.integers(max(2, schedule.microbatches), 3 * schedule.microbatches + 1))
    loss, params, inputs = network(contents), parameters(contents, seed), batch(samples, seed)
    step = fp.compile(fp.grad_and_value(pipeline(schedule)(loss)), Mesh(pipe=schedule.ranks))
    assert_equal(step(params, *inputs), fp.grad_and_value(loss)(params, *inputs))


@pytest.mark.parametrize("samples", [10, 14, 22])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.every(3)
def test_beside_zero(stage: int, samples: int) -> None:
    """On each of two data ranks 5 samples as 2, 1, 1, 1; 7 as 2, 2, 2, 1; 11 as 3, 3, 3, 2."""
    contents = ["linear", "skip", "tied", "masked", "widened", "relu"]
    loss, params, inputs = network(contents), parameters(contents, stage), batch(samples, stage)
    plan = fp.chain(fp.zero(stage, "data"), fp.pipeline("pipe", schedule="zb-h1", microbatches=4))
    step = fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=2, data=2))
    assert_equal(step(params, *inputs), fp.grad_and_value(loss)(params, *inputs))


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.every(4)
def test_training_gives_the_bits_of_the_same_microbatches_on_one_rank(name: str) -> None:
    piped, one, whole = trained_both_ways(name, torch.randn(11, 2, dtype=torch.float64))
    assert_equal(piped, one)
    for a, b in zip(optree.tree_leaves(piped), optree.tree_leaves(whole), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def noisy(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Dropout, a tied weight, and a mean over the targets that count."""
    for w in params["layers"]:
        x = x + torch.tanh(F.dropout(x @ w, 0.25) @ params["shared"])
    return F.cross_entropy(x @ params["shared"], y, ignore_index=0)


TRANSFORMS: dict[str, list[Any]] = {
    "dropout": [],
    "bf16": [fp.mixed_precision("bf16")],
    "fp16, its loss scaled": [fp.mixed_precision("fp16", loss_scale=64.0)],
    "remat": [fp.remat()],
}


@pytest.mark.parametrize("inner", TRANSFORMS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.every(3)
def test_with_other_transforms_as_accumulated_on_one_rank(inner: str, schedule: str) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator)
    params = {"layers": [draw(4, 4) for _ in range(4)], "shared": draw(4, 4)}
    inputs = draw(9, 4), torch.randint(0, 4, (9,), generator=generator)
    found = []
    for last, mesh in [
        (fp.pipeline("pipe", schedule=schedule, microbatches=4), Mesh(pipe=2)),
        (fp.accumulate(4), Mesh()),
    ]:
        plan = fp.chain(*TRANSFORMS[inner], last)
        train = fp.train_step(noisy, fp.optim.adamw(1e-2), mesh, plan, clip=1.0, seed=3, reduction="ordered")
        state = train.init(params)
        for _ in range(3):
            state, metrics = train(state, *inputs)
        found.append((train.whole(state), metrics.loss, metrics.grad_norm))
    assert_equal(*found)
    if inner == "dropout":  # keyed by a sample's place in the batch, so the whole batch at once draws the same
        train = fp.train_step(noisy, fp.optim.adamw(1e-2), Mesh(), clip=1.0, seed=3)
        state = train.init(params)
        for _ in range(3):
            state, metrics = train(state, *inputs)
        torch.testing.assert_close(metrics.loss, found[0][1])


NEED_ALL = {
    "norms",
    "variance over samples",
    "var_mean",
    "logsumexp over samples",
    "softmax over samples",
    "maximum over samples",
    "norm over samples",
    "all pairs",
    "a sample picks others",
    "running sum",
    "flipped",
    "a Gram matrix",
    "a product of samples",
    "outer products",
    "shifted",
    "one of the samples",
    "filled",
    "a loop over samples",
    "sorted",
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.every(2)
def test_every_sample_counts_once(name: str) -> None:
    """7 samples as 2, 2, 2 and 1; what needs all microbatches at once is refused, as where they are equal."""

    def loss(params: list[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return LOSSES[name](params[0], x + torch.tanh(x @ params[1]) @ params[2], y)

    (w, x, y), draw = arguments(), torch.Generator().manual_seed(1)
    params = [w, *(torch.randn(8, 8, generator=draw, dtype=torch.float64) for _ in range(2))]
    step = fp.compile(fp.grad_and_value(fp.pipeline("pipe", microbatches=4)(loss)), Mesh(pipe=2))
    if name in NEED_ALL:
        with pytest.raises(PipelineError, match="needs all microbatches before the backward of any can begin"):
            step(params, x, y)
    else:
        assert_equal_enough(step(params, x, y), torch.func.grad_and_value(loss)(params, x, y))


@pytest.mark.slow
def test_every_schedule_on_two_processes() -> None:
    wanted = uneven_on_two(0)
    for found in run_on_processes(uneven_on_two, 2):
        assert found.keys() == wanted.keys()
        for name, values in wanted.items():
            assert all(torch.equal(a, b) for a, b in zip(found[name], values, strict=True)), name


@pytest.mark.slow
def test_other_axes_beside_a_pipeline_on_four_processes() -> None:
    wanted = four_ranks(0, list(FOUR), 14)
    for found in run_on_processes(four_ranks, 4, list(FOUR), 14, timeout=300):
        for name, values in wanted.items():
            assert all(torch.equal(a, b) for a, b in zip(found[name], values, strict=True)), name


def test_results_per_sample_are_laid_side_by_side() -> None:
    def loss(w: list[torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        h = x
        for each in w:
            h = torch.tanh(h @ each)
        return h.sum(), {"features": h, "positive": x > 0, "pairs": torch.cat([h, x]).reshape(2, -1, 3)}

    w, x = [torch.eye(3, dtype=torch.float64)] * 4, torch.randn(7, 3, dtype=torch.float64)
    got = fp.compile(fp.grad_and_value(pipeline(made("1f1b", 2, 4))(loss), has_aux=True), Mesh(pipe=2))(w, x)
    wanted = fp.grad_and_value(loss, has_aux=True)(w, x)
    for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True):
        torch.testing.assert_close(a, b)


def test_other_derivatives() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x * w)
        return (x**2).mean()

    w, x = torch.tensor([0.3, 0.7], dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    plan = pipeline(made("1f1b", 2, 3))
    torch.testing.assert_close(fp.compile(fp.hessian(plan(loss)), Mesh(pipe=2))(w, x), fp.hessian(loss)(w, x))
    groups = torch.randn(3, 5, 2, dtype=torch.float64)
    of_each = fp.vmap(fp.grad(plan(loss)), in_dims=(None, 0), spmd_axis="data")
    wanted = torch.stack([fp.grad(loss)(w, group) for group in groups])
    torch.testing.assert_close(fp.compile(of_each, Mesh(pipe=2, data=3))(w, groups), wanted)
    gradients = fp.grad(plan(loss), argnums=(0, 1))
    assert_equal_enough(fp.compile(gradients, Mesh(pipe=2))(w, x), fp.grad(loss, argnums=(0, 1))(w, x))


def assert_equal_enough(a: Any, b: Any) -> None:
    for x, y in zip(optree.tree_leaves(a), optree.tree_leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_arguments_of_several_lengths_are_cut_alike() -> None:
    """5 samples as 2, 2, 1, and 3 tokens of each, laid end to end, as 6, 6, 3."""

    def loss(w: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return ((x @ w)[:, None] * tokens.reshape(-1, 3, 2)).sum()

    w, x, tokens = (torch.randint(-3, 4, shape).double() for shape in [(2, 2), (5, 2), (15, 2)])
    step = fp.compile(fp.grad_and_value(pipeline(made("1f1b", 1, 3))(loss)), Mesh(pipe=1))
    assert_equal(step(w, x, tokens), fp.grad_and_value(loss)(w, x, tokens))


def test_double_buffering() -> None:
    """An asynchronous schedule whose update sums several microbatches: 5 samples as 2, 2 and 1, four times."""
    params, x = drawn(3, 20, 0)
    plan = fp.pipeline("pipe", schedule="2bw", microbatches=12)
    train = fp.train_step(tanh_network(3), fp.optim.sgd(0.5), Mesh(pipe=3), plan)
    state, _ = train(train.init(params), x)
    assert_equal_enough(train.params(state), replayed([1] * 3, params, list(x.chunk(4))))


def test_explain_says_how_long_microbatches_are() -> None:
    loss, params = network(["linear"] * 2), parameters(["linear"] * 2, 0)
    plan = fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", microbatches=4))
    step = fp.compile(fp.grad(plan(loss)), Mesh(pipe=2, data=2))
    for samples, said in [
        (24, "a batch of 24 = 3 per microbatch · 4 microbatches · 2 data ranks"),
        (22, "a batch of 22 = 3 (2 in the last one) per microbatch · 4 microbatches · 2 data ranks"),
        (10, "a batch of 10 = 2 (1 in the last 3) per microbatch · 4 microbatches · 2 data ranks"),
    ]:
        assert said in str(step.explain(params, *batch(samples, 0)))


def pipelined(schedule: str, microbatches: int, batch: Any = None) -> Any:
    return fp.pipeline("pipe", schedule=schedule, microbatches=microbatches, batch=batch)


def test_errors() -> None:
    def loss(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w) @ w).sum() + y.sum()

    w = torch.ones(2, 2)
    step = fp.compile(fp.grad(fp.chain(fp.zero(0, "data"), pipelined("1f1b", 4))(loss)), Mesh(pipe=2, data=2))
    with pytest.raises(SpecError, match=r"a batch of 3 on each rank cannot be cut into 4 .* \(1: 3, 2: 3\)"):
        step(w, torch.ones(6, 2), torch.ones(6))
    with pytest.raises(SpecError, match=r"cannot be cut alike into 4 microbatches \(1: 5, 2: 7 on each rank\)"):
        step(w, torch.ones(10, 2), torch.ones(14))
    with pytest.raises(SpecError, match=r"1: shape \(11, 2\).* dim 0 of size 11 does not divide by 'data' of 2 ranks"):
        step(w, torch.ones(11, 2), torch.ones(11))
    inner = fp.compile(fp.grad(pipelined("1f1b", 4, (P((2, "microbatch")), P("microbatch")))(loss)), Mesh(pipe=2))
    with pytest.raises(SpecError, match=r"dim 0 of size 10 does not divide by 'microbatch' of 4 ranks"):
        inner(w, torch.ones(10, 2), torch.ones(5))
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(pipe=2), pipelined("pipedream", 4))
    said = r"a batch of 6 samples cannot be cut for the 4 updates .*: give 4 or 8 samples"
    with pytest.raises(ValueError, match=said):
        train(train.init(w), torch.ones(6, 2), torch.ones(6))
