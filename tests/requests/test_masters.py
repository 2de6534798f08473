"""Masters of parameters that are stored in the compute dtype: values, bytes held and sent, checkpoints."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functional_parallel as fp
from functional_parallel.requests import ScaledState
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from . import masters_work as work


@st.composite
def plans(draw: st.DrawFn) -> tuple[torch.dtype, Any, Mesh]:
    """A compute dtype, a plan of mixed precision, ZeRO, tensor and pipeline, and a mesh."""
    compute, scale = draw(st.sampled_from([("bf16", None), ("fp16", fp.LossScale(initial=4.0)), ("bf16", 2.0)]))
    pipe = draw(st.integers(1, 2))
    stage = draw(st.integers(0, 3))
    options: dict[str, Any] = {"loss_scale": scale}
    if stage in (1, 2) and pipe == 1 and draw(st.booleans()):
        options["layout"] = "flat"
    tensor, microbatches = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2]))
    sizes = {"data": draw(st.integers(1, 3)), "tensor": tensor, "pipe": pipe}
    plan = work.plan_of(compute, stage, options, tensor > 1, microbatches, pipe > 1)
    mesh = Mesh({axis: size for axis, size in sizes.items() if size > 1 or axis == "data"})
    return torch.float16 if compute == "fp16" else torch.bfloat16, plan, mesh


@given(plans(), st.integers(1, 7), st.integers(0, 100))
@settings(max_examples=25, deadline=None)
def test_every_plan_trains_the_masters_to_the_bit(drawn: Any, rows: int, seed: int) -> None:
    """Stage × layout × tensor × pipeline × loss scale: masters and moments are those of a loop in plain torch."""
    compute, plan, mesh = drawn
    params, state, _ = work.trained(plan, mesh, rows, seed)
    masters, expected = work.by_hand(compute, rows, seed)
    state = state.optimizer if isinstance(state, ScaledState) else state
    found, wanted = (optree.tree_leaves(each) for each in ((params, state), (masters, expected)))
    assert [leaf.dtype for leaf in found] == [leaf.dtype for leaf in wanted]
    assert all(map(torch.equal, found, wanted))


def test_processes_train_the_masters_of_simulated_ranks() -> None:
    for found in run_on_processes(work.on_a_rank, 2, timeout=120):
        expected = work.on_a_rank(0)
        assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(expected)))


# -----------------------------------------------------------------------------
# Bytes
# -----------------------------------------------------------------------------

RANKS, ELEMENTS = 4, 8 * 1024


def matrices(params: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = torch.tanh(x @ layer)
    return x.float().mean()


def step_of(stage: int, **options: Any) -> tuple[Any, Any]:
    """The state and the program of a step with Adam over four ranks; Ψ = 8 layers of 32 × 32."""
    plan = fp.chain(fp.mixed_precision("bf16", reduce="bf16"), fp.zero(stage, "data", **options))
    train = fp.train_step(matrices, fp.optim.adamw(0.1), Mesh(data=RANKS), plan, bucket=None)
    state = train.init({"layers": [torch.eye(32) for _ in range(8)]})
    return state, train.lower(state, torch.ones(RANKS, 32))


@pytest.mark.parametrize(
    ("stage", "options", "parameters", "gradients", "state"),
    [
        (0, {}, 2, 4, 12),
        (1, {}, 2, 4, 12 / RANKS),
        (2, {}, 2, 4 / RANKS, 12 / RANKS),
        (1, {"layout": "flat"}, 2, 4, 12 / RANKS),
        (3, {}, 2 / RANKS, 4 / RANKS, 12 / RANKS),
    ],
)
def test_a_rank_holds_the_bytes_of_the_paper(
    stage: int, options: dict[str, Any], parameters: float, gradients: float, state: float
) -> None:
    """2Ψ of parameters and 12Ψ of state, divided by the stage of ZeRO (arXiv 1910.02054 §3.1 and figure 1).

    Gradients are 4Ψ, as norm and update read them in float32.
    """
    held, program = step_of(stage, **options)
    alive = program.memory().alive
    assert alive["parameters"] == parameters * ELEMENTS
    assert alive["optimizer state"] == pytest.approx(state * ELEMENTS, abs=8)  # with the step's number
    if stage == 0:
        assert alive["gradients"] == gradients * ELEMENTS + 2 * ELEMENTS // 8  # one layer's, before it is widened
    own = sum(handle[0].nbytes for handle in held.handles)
    assert own == pytest.approx((parameters + state) * ELEMENTS, abs=8)
    shapes = {"layers": [torch.eye(32) for _ in range(8)]}
    plan = fp.chain(fp.mixed_precision("bf16"), fp.zero(stage, "data", **options))
    found = fp.estimate(shapes, Mesh(data=RANKS), plan, optimizer=fp.optim.adamw(0.1))
    assert (found.parameters, found.gradients) == (parameters * ELEMENTS, gradients * ELEMENTS)
    assert found.optimizer == pytest.approx(state * ELEMENTS, abs=8)


@pytest.mark.parametrize("options", [{}, {"layout": "flat"}])
@pytest.mark.parametrize("stage", [1, 2])
def test_new_parameters_are_gathered_in_the_compute_dtype(stage: int, options: dict[str, Any]) -> None:
    """2Ψ (n − 1)/n bytes, half of what float32 parameters would send."""
    _, program = step_of(stage, **options)
    sent = program.bytes_sent()
    assert sent["all_gather", ("data",)] == 2 * ELEMENTS * (RANKS - 1) // RANKS
    assert sent["psum_scatter", ("data",)] == 2 * ELEMENTS * (RANKS - 1) // RANKS


# -----------------------------------------------------------------------------
# What they are for, and checkpoints
# -----------------------------------------------------------------------------


def changed(masters: bool) -> float:
    """The share of bfloat16 weights that 20 steps of AdamW at 2e-5 change."""
    torch.manual_seed(0)
    fn, params = fp.functional(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)))
    params = optree.tree_map(lambda leaf: leaf.detach().bfloat16(), params)

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return (fn(params, x) - 1).square().mean()

    plan = fp.chain(fp.mixed_precision("bf16", masters=masters), fp.zero(2, "data"))
    train = fp.train_step(loss, fp.optim.adamw(2e-5), Mesh(data=2), plan)
    state = train.init(params)
    for step in range(20):
        state, _ = train(state, torch.randn(8, 32, generator=torch.Generator().manual_seed(step)))
    new = train.params(state)
    assert {leaf.dtype for leaf in optree.tree_leaves(new)} == {torch.float32 if masters else torch.bfloat16}
    pairs = list(zip(optree.tree_leaves(new), optree.tree_leaves(params), strict=True))
    return sum(int((a.float() != b.float()).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)


def test_small_updates_of_bfloat16_parameters_are_not_lost() -> None:
    assert changed(masters=True) == 1.0
    assert changed(masters=False) < 0.5


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_checkpoint_does_not_depend_on_the_precision(stage: int) -> None:
    """What mixed precision saves, float32 loads, and the other way; the masters are its parameters."""
    mixed, full = (
        fp.train_step(work.loss, fp.optim.adamw(0.05), Mesh(data=2), plan)
        for plan in (work.plan_of("bf16", stage, {}, False, 1, False), fp.zero(2, "data"))
    )
    state = mixed.init(work.parameters(5, 1))
    state, _ = mixed(state, work.batch(5, 0))
    saved = mixed.whole(state)
    there = full.whole(full.load(*saved, state.step))
    back = mixed.load(*there, state.step)
    for found in (there, mixed.whole(back)):
        assert all(map(torch.equal, optree.tree_leaves(found), optree.tree_leaves(saved)))
    (a, _), (b, _) = (mixed(each, work.batch(5, 1)) for each in (state, back))
    assert all(map(torch.equal, optree.tree_leaves(mixed.whole(a)), optree.tree_leaves(mixed.whole(b))))


def test_kept_parameters_have_no_second_copy() -> None:
    """A kept parameter is its own master, and is stored once, except in flat vectors."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x @ params["w"]).float() * params["scale"]).mean()

    params = {"w": torch.eye(4), "scale": torch.ones(4), "count": 3}
    for options in ({}, {"layout": "flat"}):
        plan = fp.chain(fp.mixed_precision("bf16", keep="scale"), fp.zero(1, "data", **options))
        train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), plan)
        state = train.init(params)
        state, _ = train(state, torch.ones(4, 4))
        new = train.params(state)
        assert (new["w"].dtype, new["scale"].dtype, new["count"]) == (torch.float32, torch.float32, 3)
        assert not torch.equal(new["scale"], params["scale"])


def test_a_function_of_the_state_takes_the_stored_parameters() -> None:
    plan = work.plan_of("bf16", 1, {}, False, 1, False)
    train = fp.train_step(work.loss, fp.optim.adamw(0.05), Mesh(data=2), plan)
    state = train.init(work.parameters(5, 1))
    expected = work.loss(optree.tree_map(torch.Tensor.bfloat16, train.params(state)), work.batch(5, 0).bfloat16())
    assert torch.equal(train.compile(plan(work.loss))(state, work.batch(5, 0)), expected)
    plain = fp.zero(1, "data")(work.loss)  # in float32, of rounded parameters
    rounded = optree.tree_map(lambda leaf: leaf.bfloat16().float(), train.params(state))
    torch.testing.assert_close(train.compile(plain)(state, work.batch(5, 0)), work.loss(rounded, work.batch(5, 0)))


def test_stacked_layers_and_asynchronous_pipelines_have_masters() -> None:
    """Kept patterns name the stack; versions of weights are stashed in the compute dtype."""

    def deep(params: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in range(4):
            x = torch.tanh(x @ params["w"][layer] * params["scale"][layer])
        return x.float().square().mean()

    params = {"w": torch.randn(4, 3, 3), "scale": torch.ones(4, 3)}
    for schedule in ("1f1b", "pipedream"):
        pipeline = fp.pipeline("pipe", {"*": P("pipe")}, schedule=schedule, microbatches=4)
        plan = fp.chain(fp.mixed_precision("bf16", keep="scale"), fp.zero(1, "data"), pipeline)
        train = fp.train_step(deep, fp.optim.adamw(1e-4), Mesh(data=2, pipe=2), plan)
        state = train.init(params)
        stored = {
            train.states.runtime_for(state).whole(h, s).dtype
            for h, s in zip(state.handles[:8], state.layout.specs, strict=False)
        }
        assert stored == {torch.bfloat16, torch.float32}
        state, _ = train(state, torch.randn(16, 3))
        new = train.params(state)
        assert {leaf.dtype for leaf in new.values()} == {torch.float32}
        assert all(not torch.equal(new[name], params[name]) for name in params)
