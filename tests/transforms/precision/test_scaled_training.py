"""Loss scaling in a training step: the same steps as without, but for those that overflow, which no rank takes."""

from __future__ import annotations

import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, split

from .work import MESH, PARAMS, bad, good, loss, plan

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import corpus
import gpt

RULES = fp.LossScale(initial=16.0, window=2)


@cache
def step(stage: int, loss_scale: Any, clip: float | None = None, mesh: Mesh = MESH) -> Any:
    """A training step, made once for all tests."""
    optimizer = fp.optim.adamw(0.1)
    return fp.train_step(loss, optimizer, mesh, plan(stage, loss_scale), clip=clip, reduction="ordered")


def trained(stage: int, batches: list[Tensor], loss_scale: Any, clip: float | None = None) -> Any:
    """Whole parameters and optimizer state after these batches."""
    train = step(stage, loss_scale, clip)
    state = train.init(PARAMS)
    for batch in batches:
        state, _ = train(state, batch)
    return train.whole(state)


def same(a: Any, b: Any) -> bool:
    return all(map(torch.equal, optree.tree_leaves(a), optree.tree_leaves(b)))


# -----------------------------------------------------------------------------
# Overflow
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_one_rank_skips_the_step_on_all(stage: int, rank: int) -> None:
    train = step(stage, fp.LossScale(initial=16.0, hysteresis=1))
    state, _ = train(train.init(PARAMS), good(0))
    before = train.whole(state)
    state, metrics = train(state, bad(rank))
    assert metrics.skipped.item() is True
    assert metrics.loss_scale.item() == 16.0
    after = train.whole(state)
    assert same(before[0], after[0])
    assert same(before[1].optimizer, after[1].optimizer)
    assert after[1].loss_scale.scale.item() == 8.0
    state, metrics = train(state, good(1))
    assert metrics.skipped.item() is False
    assert metrics.loss_scale.item() == 8.0
    assert not same(train.params(state), after[0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_is_lost_by_a_skipped_step(stage: int) -> None:
    """The same parameters and optimizer state, to the bit, as if the bad batch had never been; clipped or not."""
    for clip in (None, 0.5):
        with_bad = trained(stage, [good(0), bad(1), good(1), good(2)], RULES, clip)
        without = trained(stage, [good(0), good(1), good(2)], RULES, clip)
        assert same(with_bad[0], without[0])
        assert same(with_bad[1].optimizer, without[1].optimizer)


def test_an_overflow_that_only_the_sum_over_ranks_has() -> None:
    train = fp.train_step(
        lambda w, x: (x @ w).sum(), fp.optim.sgd(1.0), MESH, fp.chain(fp.mixed_precision("fp16"), fp.zero(3, "data"))
    )
    large = torch.full((2, 2), 60_000.0)  # the gradient of one rank holds it, in float16; scaled it does not
    state, metrics = train(train.init(torch.ones(2)), large)
    assert metrics.skipped.item() is True
    assert train.params(state).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("pattern", "scales"),
    [
        ("........", [16, 16, 32, 32, 64, 64, 128, 128]),
        ("X.X.X.X.", [16, 16, 8, 8, 4, 4, 2, 2]),
        ("XX...XX...", [16, 8, 8, 8, 16, 16, 8, 8, 8, 16]),
    ],
)
def test_the_scale_follows_the_rules_in_training(pattern: str, scales: list[int]) -> None:
    """DeepSpeed's traces, entry by entry: the scale after each step."""
    train = step(3, RULES)
    state, found = train.init(PARAMS), []
    for index, mark in enumerate(pattern):
        state, metrics = train(state, bad(index % 2) if mark == "X" else good(index))
        assert metrics.skipped.item() is (mark == "X")
        found.append(train.whole(state)[1].loss_scale.scale.item())
    assert found == scales


def test_an_overflow_at_the_minimum_is_told() -> None:
    rules = fp.LossScale(initial=2.0, hysteresis=1)
    train = fp.train_step(loss, fp.optim.sgd(0.1), MESH, plan(3, rules), nonfinite="continue")
    state = train.init(PARAMS)
    for _ in range(2):
        train.check(state)
        state, metrics = train(state, bad(0))
    assert metrics.loss_scale.item() == 1.0
    with pytest.raises(fp.LossScaleError, match="overflow at the lowest loss scale, 1"):
        train.check(state)


# -----------------------------------------------------------------------------
# Without overflow
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.every(2)
def test_updates_do_not_depend_on_the_scale(stage: int, clip: float | None) -> None:
    """Nor on its growth: gradients are unscaled by the scale that the forward used. Powers of two are exact."""
    batches = [good(step) for step in range(5)]
    growing = trained(stage, batches, fp.LossScale(initial=4.0, window=1, late_growth=False), clip)
    assert growing[1].loss_scale.scale.item() == 4.0 * 2**5
    for scale in (1024.0, None):
        constant = trained(stage, batches, scale, clip)
        assert same(growing[0], constant[0])
        assert same(growing[1].optimizer, constant[1].optimizer if scale else constant[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_that_are_narrow_themselves_train_at_a_scale_that_their_type_does_not_hold(
    dtype: torch.dtype,
) -> None:
    w, x = torch.full((4,), 0.5), torch.linspace(0.01, 0.1, 32).reshape(8, 4)
    plan = fp.chain(fp.mixed_precision("fp16", loss_scale=2.0**16), fp.zero(1, "data"))
    train = fp.train_step(lambda w, x: (x @ w).square().mean(), fp.optim.sgd(1.0), MESH, plan)
    state, metrics = train(train.init(w.to(dtype)), x)
    want = torch.func.grad(lambda w: (x @ w).square().mean())(w)
    assert not metrics.skipped
    torch.testing.assert_close(metrics.grad_norm, want.norm(), rtol=0.01, atol=0)
    torch.testing.assert_close(train.params(state).float(), w - want, rtol=0.01, atol=0)


def test_metrics_are_those_of_the_loss_itself() -> None:
    scaled = fp.train_step(loss, fp.optim.sgd(0.1), MESH, plan(3, 4096.0))
    plain = fp.train_step(loss, fp.optim.sgd(0.1), MESH, plan(3, None))
    (_, a), (_, b) = scaled(scaled.init(PARAMS), good(0)), plain(plain.init(PARAMS), good(0))
    assert torch.equal(a.loss, b.loss)
    assert torch.equal(a.grad_norm, b.grad_norm)
    assert (a.loss_scale.item(), a.skipped.item()) == (4096.0, False)
    assert (b.loss_scale, b.skipped) == (None, None)


def test_aux_passes_by_the_scale() -> None:
    def with_aux(params: dict[str, Tensor], x: Tensor) -> Any:
        return loss(params, x), {"rows": x.sum(0)}

    found = []
    for rules in (64.0, None):
        train = fp.train_step(with_aux, fp.optim.sgd(0.1), MESH, plan(3, rules), has_aux=True)
        found.append(train(train.init(PARAMS), good(0))[1])
    assert same(found[0].aux, found[1].aux)
    assert torch.equal(found[0].loss, found[1].loss)


# -----------------------------------------------------------------------------
# Saving
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_scale_is_saved_with_the_optimizer(stage: int) -> None:
    """And resumed, at another stage to the bit, on more ranks within rounding."""
    batches = [good(0), bad(0), good(1), bad(1), good(2), good(3)]
    through = trained(3, batches, RULES)
    half = trained(3, batches[:3], RULES)
    assert half[1].loss_scale.patience.item() == 1
    for mesh, bound in ((MESH, 0.0), (Mesh(data=4), 0.02)):
        train = step(stage, RULES, mesh=mesh)
        state = train.load(*half, 3)
        for batch in batches[3:]:
            state, _ = train(state, batch)
        resumed = train.whole(state)
        assert same(through[1].loss_scale, resumed[1].loss_scale)
        for a, b in zip(*map(optree.tree_leaves, (through[0], resumed[0])), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=bound)


def test_a_state_without_a_scale_is_resumed_with_one_and_the_other_way_round() -> None:
    plain, scaled = (step(3, rules) for rules in (None, RULES))
    saved = trained(3, [good(0)], None)
    state, _ = scaled(scaled.load(*saved, 1), good(1))
    back, _ = plain(plain.load(*scaled.whole(state), 2), good(2))
    assert same(plain.whole(back), trained(3, [good(0), good(1), good(2)], None))


# -----------------------------------------------------------------------------
# A model
# -----------------------------------------------------------------------------


TEXT = gpt.Config(layers=1, embed=32, heads=2, time=16)


def learned(kind: str, steps: int = 30) -> tuple[list[float], int]:
    """The losses of a GPT on text, one per update, and the number of skipped steps, which repeat their batch."""
    rules = fp.LossScale(initial=2.0**24) if kind == "fp16" else None
    precision = () if kind == "fp32" else (fp.mixed_precision(kind, loss_scale=rules),)
    plan = fp.chain(*precision, fp.zero(3, "data"))
    train = fp.train_step(partial(gpt.loss, config=TEXT), fp.optim.adamw(1e-3), Mesh(data=2), plan, clip=1.0)
    text, _ = corpus.load(None, most=1_000_000)
    state, losses, skipped = train.init(split(gpt.init(TEXT))[0]), [], 0
    while len(losses) < steps:
        state, metrics = train(state, corpus.batch(text, 8, TEXT.time, len(losses), 0))
        if metrics.skipped is not None and metrics.skipped:
            skipped += 1
        else:
            losses.append(metrics.loss.item())
    return losses, skipped


@pytest.fixture(scope="module")
def wide() -> list[float]:
    return learned("fp32")[0]


@pytest.mark.parametrize(("kind", "bound"), [("fp16", 0.004), ("bf16", 0.01)])
def test_a_gpt_has_the_losses_of_fp32_on_text(kind: str, bound: float, wide: list[float]) -> None:
    """At every step, in nats, at a rate below that at which the run is chaotic. The first fp16 scales overflow."""
    narrow, skipped = learned(kind)
    assert wide[0] - min(wide[-10:]) > 1
    assert max(abs(a - b) for a, b in zip(narrow, wide, strict=True)) < bound
    assert skipped > 0 if kind == "fp16" else skipped == 0
