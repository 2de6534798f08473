"""Where a model is cut, and what lives on which stage."""

from __future__ import annotations

from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import PipelineError
from sharding_specs import Mesh, P

from .networks import assert_same, normal, tied_table


def chain_of(count: int) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        for weight in p:
            x = torch.tanh(x @ weight)
        return x.mean()

    return loss


def layers_of_ranks(train: Any, state: Any) -> list[list[str]]:
    """Per rank the parameters that it holds."""
    held: list[list[str]] = [[] for _ in range(train.mesh.axis_size("pipe"))]
    for path, handle in zip(train.program.in_paths, state.handles, strict=False):
        for rank in handle.holders if path.startswith("0/0/") else ():
            held[rank].append(path.removeprefix("0/0/"))
    return held


def test_the_automatic_cut_is_in_balance() -> None:
    params = [normal(2, 2)] * 4 + [normal(2, 64), normal(64, 64), normal(64, 2)] + [normal(2, 2)] * 3
    plan = fp.pipeline("pipe", microbatches=2)
    train = fp.train_step(chain_of(10), fp.optim.sgd(0.1), Mesh(pipe=3), plan)
    state, _ = train(train.init(params), normal(8, 2))
    largest = [rank for rank, held in enumerate(layers_of_ranks(train, state)) if "5" in held]
    assert len(layers_of_ranks(train, state)[largest[0]]) < 4


def test_work_or_memory_in_balance_beside_a_large_table() -> None:
    """Rows of a table are few to read and the table much to hold; the other stages are alike whatever it weighs."""

    def loss(p: Any, tokens: Tensor) -> Tensor:
        h = p["table"][tokens]
        for weight in p["layers"]:
            h = torch.tanh(h @ weight)
        return (h**2).mean()

    params = {"table": normal(4000, 8), "layers": [normal(8, 8) for _ in range(8)]}
    beside: dict[str, list[int]] = {}
    for balance in ("work", "memory"):
        plan = fp.pipeline("pipe", microbatches=4, balance=balance)
        train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(pipe=4), plan)
        state, _ = train(train.init(params), torch.randint(0, 4000, (64,)))
        held = layers_of_ranks(train, state)
        assert "table" in held[0]
        beside[balance] = [sum(path.startswith("layers") for path in each) for each in held]
    assert beside["memory"][0] == 0 and min(beside["memory"][1:]) >= 2
    assert min(beside["work"]) >= 1 and max(beside["work"]) <= 3


def test_parameters_and_state_live_where_they_are_used() -> None:
    params = {"table": normal(7, 4), "layers": [normal(4, 4) for _ in range(4)]}
    train = fp.train_step(tied_table, fp.optim.adamw(0.1), Mesh(pipe=4), fp.pipeline("pipe", microbatches=4), clip=1.0)
    state, _ = train(train.init(params), torch.randint(0, 7, (8,)))
    held = layers_of_ranks(train, state)
    assert [path for path in held[0] if path == "table"] == [path for path in held[3] if path == "table"] == ["table"]
    assert "table" not in held[1] + held[2]
    assert sorted(path for each in held for path in each if path != "table") == [f"layers/{i}" for i in range(4)]
    for path, handle in zip(train.program.in_paths, state.handles, strict=False):
        if path.startswith(("0/1/1/", "0/1/2/")):  # the moments
            assert handle.holders == frozenset(r for r, each in enumerate(held) if path[6:] in each), path
            assert set(handle.parts) == set(handle.holders)


@pytest.mark.parametrize(
    ("schedule", "options", "stages"),
    [
        (fp.schedules.one_f_one_b, {}, 2),
        (fp.schedules.zb_v, {}, 4),
        (fp.schedules.interleaved, {"chunks": 3}, 6),
        ("looped-bfs", {"chunks": 3}, 6),
        (lambda stages, microbatches: fp.schedules.gpipe(stages, microbatches), {}, 2),
        (lambda stages, microbatches: fp.schedules.interleaved(stages, microbatches), {"chunks": 2}, 4),
    ],
)
def test_a_schedule_by_its_function(schedule: Any, options: dict[str, int], stages: int) -> None:
    program = assert_same(chain_of(6), [normal(2, 2) for _ in range(6)], normal(8, 2), schedule=schedule, **options)
    assert program.schedule.stages == stages


def test_stacked_layers() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        h = x @ p["in"]
        for weight, bias in zip(p["w"], p["b"], strict=True):
            h = h + torch.tanh(h @ weight + bias)
        return (h**2).mean()

    params = {"in": normal(2, 4), "w": normal(4, 4, 4), "b": normal(4, 4)}
    specs = {"w": P("pipe", None, "tensor"), "b": P("pipe", "tensor"), "in": P(None, "tensor")}
    x = normal(8, 2)
    wanted = fp.grad_and_value(loss)(params, x)
    plans = {
        "pipe": (fp.pipeline("pipe", specs, microbatches=2), Mesh(pipe=2)),
        "interleaved": (fp.pipeline("pipe", specs, microbatches=2, schedule="interleaved"), Mesh(pipe=2)),
        "all": (
            fp.chain(
                fp.tensor_parallel("tensor", specs), fp.zero(3, "data"), fp.pipeline("pipe", specs, microbatches=2)
            ),
            Mesh(pipe=2, data=2, tensor=2),
        ),
        "from specs": (fp.from_specs(specs, Mesh(pipe=4, tensor=2), microbatches=2), Mesh(pipe=4, tensor=2)),
    }
    for name, (plan, mesh) in plans.items():
        got = fp.compile(fp.grad_and_value(plan(loss)), mesh)(params, x)
        for a, b in zip(optree.tree_leaves(got), optree.tree_leaves(wanted), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)
        train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, plan, clip=1.0)
        state, _ = train(train.init(params), x)
        whole = train.whole(state)
        assert optree.tree_structure(whole[0]) == optree.tree_structure(params)
        again = train.whole(train.load(*whole, 1))
        assert optree.tree_all(optree.tree_map(torch.equal, whole, again))
        assert all(len(h.holders) == 1 for h in state.handles[: 2 * 4]), name  # every layer on one rank


@pytest.mark.parametrize("take", [list, lambda w: [w[i] for i in range(4)]], ids=["unbound", "indexed"])
@pytest.mark.parametrize("inner", [fp.mixed_precision("bf16"), fp.zero(1, "data"), fp.zero(3, "data")], ids=str)
def test_each_stage_holds_its_own_layers_of_a_stack(inner: Any, take: Any) -> None:
    """Ops on the whole stack, such as a cast or a gather, act on one layer at a time."""
    params = {"w": normal(4, 4, 4).float()}
    plan = fp.chain(inner, fp.pipeline("pipe", {"w": P("pipe")}, microbatches=2))
    train = fp.train_step(lambda p, x: chain_of(4)(take(p["w"]), x), fp.optim.sgd(0.1), Mesh(pipe=2, data=2), plan)
    state, _ = train(train.init(params), normal(8, 4).float())
    assert layers_of_ranks(train, state) == [["w/0", "w/1"], ["w/2", "w/3"]]


# -----------------------------------------------------------------------------
# Other transforms inside
# -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner",
    [fp.remat(), fp.remat("nothing"), fp.remat("layers", every=3), fp.mixed_precision("bf16"), fp.zero(2, "data")],
    ids=str,
)
def test_composes(inner: Any) -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        for layer in p["layers"]:
            x = x + torch.tanh(x @ layer["a"]) @ layer["b"]
        return (x**2).mean()

    params = {"layers": [{"a": torch.randn(4, 8), "b": torch.randn(8, 4)} for _ in range(4)]}
    x = torch.randn(16, 4)
    results = []
    for plan, mesh in [
        (fp.chain(inner, fp.pipeline("pipe", microbatches=2, schedule="zb-h1")), Mesh(pipe=2, data=2)),
        (fp.chain(inner, fp.accumulate(2)), Mesh(pipe=2, data=2)),
    ]:
        train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, plan, clip=1.0)
        state = train.init(params)
        for _ in range(2):
            state, metrics = train(state, x)
        results.append((train.params(state), metrics.loss, metrics.grad_norm))
    for a, b in zip(*map(optree.tree_leaves, results), strict=True):
        assert torch.equal(a, b)


def test_dropout_is_the_same_in_a_pipeline() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        for weight in p:
            x = F.dropout(torch.tanh(x @ weight), 0.3)
        return x.mean()

    params, x = [normal(4, 4) for _ in range(2)], normal(8, 4)
    losses = []
    for plan, mesh in [(fp.pipeline("pipe", microbatches=2), Mesh(pipe=2)), (fp.accumulate(4), Mesh()), (None, Mesh())]:
        train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan, seed=0)
        state = train.init(params)
        for _ in range(3):
            state, metrics = train(state, x)
        losses.append(metrics.loss)
    for other in losses[1:]:
        torch.testing.assert_close(losses[0], other, rtol=1e-12, atol=1e-12)


def test_loss_scale_skips_a_step_on_all_ranks() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        for weight in p:
            x = torch.tanh(x @ weight)
        return x.float().mean()

    params, x = [torch.randn(4, 4) for _ in range(4)], torch.randn(8, 4)
    plan = fp.chain(fp.mixed_precision("fp16"), fp.pipeline("pipe", microbatches=4))
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(pipe=2), plan)
    state = train.init(params)
    state, metrics = train(state, x)
    assert not metrics.skipped
    before = train.params(state)
    state, metrics = train(state, torch.full_like(x, float("inf")))
    assert metrics.skipped
    for a, b in zip(before, train.params(state), strict=True):
        assert torch.equal(a, b)


# -----------------------------------------------------------------------------
# Bad input
# -----------------------------------------------------------------------------


def run(loss: Any, params: Any, x: Tensor, ranks: int = 2, **options: Any) -> Any:
    plan = fp.pipeline("pipe", **{"microbatches": 4, **options})
    return fp.compile(fp.grad_and_value(plan(loss)), Mesh(pipe=ranks))(params, x)


def marked(*places: int) -> Any:
    def loss(p: Any, x: Tensor) -> Tensor:
        for number, weight in enumerate(p):
            x = torch.tanh(x @ weight)
            for _ in range(places.count(number)):
                x = fp.stage_boundary(x)
        return x.mean()

    return loss


FOUR, X = [torch.eye(2, dtype=torch.float64)] * 4, torch.ones(8, 2, dtype=torch.float64)


def recomputed(p: Any, x: Tensor) -> Tensor:
    @fp.recompute
    def block(x: Tensor) -> Tensor:
        return torch.tanh(fp.stage_boundary(torch.tanh(x @ p[0])) @ p[1])

    return block(x).mean()


def normalised(p: Any, x: Tensor) -> Tensor:
    for weight in p:
        x = F.batch_norm(x @ weight, None, None, training=True)
    return (x**3).mean()


BAD = {
    "fewer layers than stages": (
        lambda: run(chain_of(1), FOUR[:1], X, ranks=8),
        "can be cut into at most . stages, and the schedule has 8",
    ),
    "stacked layers that the stages do not divide": (
        lambda: run(
            lambda p, x: (x @ p["w"][0] @ p["w"][1]).sum(),
            {"w": torch.ones(2, 2, 2, dtype=torch.float64)},
            X,
            4,
            specs={"w": P("pipe")},
        ),
        r"4 stages do not divide the stacked layers of w \(2 layers\)",
    ),
    **{
        f"a stack used as a whole, {name}": (
            lambda used=used: run(
                lambda p, x: (x * used(p["w"])).sum(),
                {"w": torch.ones(2, 2, dtype=torch.float64)},
                X,
                specs={"w": P("pipe")},
            ),
            r"test_cuts\.py.*uses a stack of layers as a whole",
        )
        for name, used in {
            "its sum": lambda w: w.sum(0),
            "its columns": lambda w: w.unbind(1)[0],
            "a column": lambda w: w[:, 1],
        }.items()
    },
    "the axis on another dim": (
        lambda: run(
            lambda p, x: p["w"].sum(), {"w": torch.ones(2, 2, dtype=torch.float64)}, X, specs={"w": P(None, "pipe")}
        ),
        "cuts the first dim of a stack",
    ),
    "more microbatches than samples": (lambda: run(chain_of(4), FOUR, X, microbatches=16), "16"),
    "too many marks": (lambda: run(marked(0, 1), FOUR, X), "make 3 stages, but the schedule has 2: mark 1"),
    "a forward of which nothing is left": (
        lambda: fp.compile(
            fp.grad(fp.chain(fp.remat("nothing"), fp.pipeline("pipe", microbatches=4))(chain_of(4))), Mesh(pipe=2)
        )(FOUR, X),
        "all of the model is computed in its backward.*compile fp.grad_and_value",
    ),
    "a stage that uses nothing": (lambda: run(marked(1, 1), FOUR, X, ranks=3), "stage 1 of 3 uses no parameter"),
    "a mark in a block that is computed again": (lambda: run(recomputed, FOUR, X), r"test_cuts\.py.*fp\.recompute"),
    "a batch norm over all microbatches": (lambda: run(normalised, FOUR, X), "needs all microbatches"),
    "no such axis": (
        lambda: fp.compile(fp.grad(fp.pipeline("stages", microbatches=2)(chain_of(4))), Mesh(pipe=2))(FOUR, X),
        "has no axis 'stages'",
    ),
    "no such schedule": (lambda: fp.pipeline("pipe", schedule="fastest", microbatches=2), "there is no schedule"),
    "no schedule at all": (lambda: fp.pipeline("pipe", schedule=3, microbatches=2), "a name such as '1f1b'"),
    "a function that makes another number of ranks": (
        lambda: run(
            chain_of(4), FOUR, X, schedule=lambda stages, microbatches: fp.schedules.zb_v(stages, microbatches)
        ),
        "for 1 ranks and 4 microbatches, .* it was asked for 2 stages",
    ),
    "a stage of the batch alone": (
        lambda: run(lambda p, x: (fp.stage_boundary(torch.tanh(x)) @ p[0] @ p[1]).sum(), FOUR, X),
        "stage 0 of 2 uses no parameter .* depends on the batch alone",
    ),
    "no microbatch": (lambda: fp.pipeline("pipe", microbatches=0), "1 or more"),
    "chunks of a schedule that has its own": (
        lambda: fp.pipeline("pipe", microbatches=2, chunks=2),
        "'1f1b' says itself how many stages a rank holds; .* 'interleaved', 'looped-bfs'",
    ),
    "chunks of a schedule that is made": (
        lambda: fp.pipeline("pipe", schedule=fp.schedules.gpipe(2, 2), microbatches=2, chunks=2),
        "'gpipe' says itself",
    ),
    "no chunk": (lambda: fp.pipeline("pipe", schedule="interleaved", microbatches=2, chunks=0), "1 or more"),
    "a function that makes no schedule": (
        lambda: run(chain_of(4), FOUR, X, schedule=lambda stages, microbatches: ["0F0 0B0"]),
        "'<lambda>' made a list, no Schedule",
    ),
    "no such balance": (lambda: fp.pipeline("pipe", microbatches=2, balance="luck"), "'work' or 'memory'"),
    "outside a schedule's domain": (
        lambda: run(chain_of(4), FOUR, X, schedule="dualpipe", microbatches=2),
        "dualpipe takes",
    ),
    "a schedule for other numbers": (
        lambda: run(chain_of(4), FOUR, X, schedule=fp.schedules.gpipe(2, 8)),
        "2 ranks and 8 microbatches",
    ),
    "an illegal schedule": (
        lambda: run(
            chain_of(4),
            FOUR,
            X,
            microbatches=1,
            schedule=fp.schedules.Schedule.of(["0F0 0B0", "1B0 1F0"], microbatches=1),
        ),
        "rank 1 is stuck at 1B0",
    ),
    "a metric that needs all samples": (
        lambda: fp.compile(
            fp.grad(
                fp.pipeline("pipe", microbatches=2)(lambda w, x: ((x @ w[0]).mean(), (x @ w[0]).std())), has_aux=True
            ),
            Mesh(pipe=1),
        )(FOUR, X),
        r"test_cuts.py:\d+: aten\..* needs all microbatches .*; no gradient needs it: return what it is computed of",
    ),
    "a largest value that has a derivative": (
        lambda: fp.compile(
            fp.grad(
                fp.pipeline("pipe", microbatches=2)(lambda w, x: ((x @ w[0]).mean(), (x @ w[0]).max())), has_aux=True
            ),
            Mesh(pipe=1),
        )(FOUR, X),
        r"test_cuts.py:\d+: aten\..* needs all microbatches .*; no gradient needs it: take it of x\.detach\(\), or",
    ),
    "what is no batch, cut as one": (
        lambda: run(
            lambda w, batch: (batch["x"] @ w[0] + w[1][batch["positions"] % 2]).square().sum(),
            FOUR,
            {"x": torch.ones(8, 8, 2, dtype=torch.float64), "positions": torch.arange(8)},
        ),
        r"It is computed of 1/positions: if that has no samples, say with batch= that it is not to be cut",
    ),
    "accumulation inside": (
        lambda: fp.pipeline("pipe", microbatches=2)(fp.accumulate(2)(chain_of(4))),
        r"leave fp\.accumulate out",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises((ValueError, PipelineError), match=message):
        call()


@pytest.mark.filterwarnings("ignore::functional_parallel.PartitionWarning")
@pytest.mark.parametrize("samples", [8, 7])
@pytest.mark.parametrize("outer", [[], [fp.data_parallel("data")]], ids=["alone", "beside data"])
def test_an_op_without_a_rule_is_named(samples: int, outer: list[Any]) -> None:
    def loss(w: Any, x: Tensor) -> Tensor:
        return ((x @ w[0]).kthvalue(1).values ** 2).mean()

    plan = fp.chain(*outer, fp.pipeline("pipe", microbatches=2))
    step = fp.compile(fp.grad(plan(loss)), Mesh(pipe=1, data=1))
    said = (
        r"test_cuts.py:\d+: aten.kthvalue.default needs all microbatches .*; it has no sharding rule: give it one with"
    )
    with pytest.raises(PipelineError, match=said):
        step(FOUR, torch.ones(samples, 2, dtype=torch.float64))


def test_a_cut_by_the_numbers_of_layers_is_the_same_for_every_batch() -> None:
    """The first layers have most of the work, and each stage has the same number of them."""

    def f(params: Any, x: Tensor) -> Tensor:
        x = x @ params["embed"]
        for layer in params["blocks"]:
            x = torch.tanh(x @ layer["up"]) @ layer["down"]
        return x @ params["head"]

    widths = (64, 64, 2, 2)
    blocks = [{"up": normal(4, width), "down": normal(width, 4)} for width in widths]
    params = {"embed": normal(3, 4), "blocks": blocks, "head": normal(4, 2)}
    for balance, wanted in (("layers", [0, 0, 1, 1]), ("work", [0, 1, 1, 1])):
        step = fp.compile(fp.pipeline("pipe", microbatches=1, balance=balance)(f), Mesh(pipe=2))
        for rows in (2, 50):
            program = step.lower(params, normal(rows, 3))
            found = {path: program.holders(node) for path, node in zip(program.in_paths, program.inputs, strict=True)}
            assert [min(found[f"0/blocks/{layer}/up"]) for layer in range(4)] == wanted
            assert found["0/embed"] == {0} and found["0/head"] == {1}
    few = fp.compile(fp.pipeline("pipe", microbatches=1, balance="layers")(f), Mesh(pipe=3))
    torch.testing.assert_close(
        few({**params, "blocks": blocks[:2]}, x := normal(4, 3)), f({**params, "blocks": blocks[:2]}, x)
    )
