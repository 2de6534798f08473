"""Local SGD and DiLoCo are what their papers say, written as a loop over replicas; and send nothing in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P

from ..processes import run_on_processes
from ..trees import assert_close, assert_equal

NESTEROV = fp.optim.sgd(0.5, momentum=0.5, nesterov=True)


def loss(params: Any, x: Tensor) -> Tensor:
    """A mean over samples, closed on dyadic numbers where their count is a power of two."""
    hidden = (x @ params["w"]).relu() + params["b"]
    return (hidden * hidden).sum(1).mean()


def integers(*shape: int, seed: int, top: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-top, top + 1, shape, generator=generator).double()


def drawn(seed: int, width: int = 4) -> dict[str, Tensor]:
    return {"w": integers(3, width, seed=seed), "b": integers(width, seed=seed + 1)}


def by_hand(
    f: Callable[..., Tensor],
    params: Any,
    batches: list[Tensor],
    ranks: int,
    inner: int,
    optimizer: fp.optim.Optimizer,
    outer: fp.optim.Optimizer | None,
) -> Any:
    """The loop of the papers."""
    anchor, replicas = params, [params] * ranks
    states, outer_state = [optimizer.init(params)] * ranks, None if outer is None else outer.init(params)
    for number, batch in enumerate(batches, 1):
        for rank, part in enumerate(batch.chunk(ranks)):
            grads = torch.func.grad(f)(replicas[rank], part)
            replicas[rank], states[rank] = optimizer.update(grads, states[rank], replicas[rank])
        if number % inner == 0:
            mean = optree.tree_map(lambda *each: sum(each[1:], each[0]) / ranks, *replicas)
            if outer is None:
                anchor = mean
            else:
                difference = optree.tree_map(torch.sub, anchor, mean)
                anchor, outer_state = outer.update(difference, outer_state, anchor)
            replicas = [anchor] * ranks
    return anchor


def trained(train: Any, params: Any, batches: list[Tensor]) -> tuple[Any, list[Any]]:
    state, losses = train.init(params), []
    for batch in batches:
        state, metrics = train(state, batch)
        losses.append(metrics.loss)
    return train.params(state), losses


@settings(max_examples=15, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4]),
    samples=st.sampled_from([1, 2]),
    inner=st.integers(1, 3),
    width=st.integers(1, 5),
    outer=st.sampled_from([None, NESTEROV]),
    seed=st.integers(0, 1000),
)
def test_it_is_the_loop_of_the_papers(
    ranks: int, samples: int, inner: int, width: int, outer: fp.optim.Optimizer | None, seed: int
) -> None:
    params, optimizer = drawn(seed, width), fp.optim.sgd(0.25, momentum=0.5)
    batches = [integers(ranks * samples, 3, seed=seed + step, top=1) for step in range(2 * inner)]
    plan = fp.local_sgd("data", inner=inner) if outer is None else fp.diloco("data", inner=inner, outer=outer)
    train = fp.train_step(loss, optimizer, Mesh(data=ranks), plan, nonfinite="continue")
    found, losses = trained(train, params, batches)
    assert_equal(found, by_hand(loss, params, batches, ranks, inner, optimizer, outer))
    assert [each is None for each in losses] == [number % inner != 0 for number in range(1, 2 * inner + 1)]


@settings(max_examples=10, deadline=None)
@given(ranks=st.sampled_from([1, 2, 4]), samples=st.sampled_from([1, 2]), seed=st.integers(0, 1000))
def test_one_inner_step_of_sgd_is_synchronous_training(ranks: int, samples: int, seed: int) -> None:
    """For SGD the mean of the new parameters is the parameters minus the mean gradient; also as DiLoCo with rate 1."""
    params, mesh = drawn(seed), Mesh(data=ranks)
    batches = [integers(ranks * samples, 3, seed=seed + step, top=1) for step in range(2)]
    plans = (
        fp.data_parallel("data"),
        fp.local_sgd("data", inner=1),
        fp.diloco("data", inner=1, outer=fp.optim.sgd(1.0)),
    )
    synchronous, *others = (
        trained(fp.train_step(loss, fp.optim.sgd(0.25), mesh, plan), params, batches) for plan in plans
    )
    for found, losses in others:
        assert_equal(found, synchronous[0])
        assert_equal(losses, synchronous[1])


def test_one_inner_step_of_any_optimizer_averages_parameters() -> None:
    params, batches = drawn(0), [integers(6, 3, seed=step) for step in range(4)]
    for optimizer in (fp.optim.adamw(0.05), fp.optim.adafactor(0.05)):
        train = fp.train_step(loss, optimizer, Mesh(data=3), fp.local_sgd("data", inner=1))
        found, _ = trained(train, params, batches)
        assert_close(found, by_hand(loss, params, batches, 3, 1, optimizer, None))


def test_inner_steps_send_nothing() -> None:
    train = fp.train_step(loss, fp.optim.adamw(0.1), Mesh(data=4), fp.diloco("data", inner=3), bucket=None)
    state, counts = train.init(drawn(0)), []
    for step in range(6):
        state, _ = train(state, integers(8, 3, seed=step))
        counts.append(train.program.counts())  # type: ignore[union-attr]
    exchange = {("psum", ("data",)): 3}  # two parameters and the loss
    assert counts == [{}, {}, exchange] * 2


PLANS: dict[str, tuple[Mesh, Any]] = {
    "tensor": (Mesh(data=2, tensor=2), fp.tensor_parallel("tensor", {"w": P(None, "tensor"), "b": P("tensor")})),
    "zero 1": (Mesh(data=2, shard=2), fp.zero(1, "shard")),
    "zero 3": (Mesh(data=2, shard=2), fp.zero(3, "shard")),
    "data inside": (Mesh(data=2, shard=2), fp.data_parallel("shard")),
    "remat": (Mesh(data=2), fp.remat()),
    "accumulate": (Mesh(data=2), fp.accumulate(2)),
}


@pytest.mark.parametrize("name", PLANS)
def test_each_replica_has_a_plan_of_its_own(name: str) -> None:
    mesh, plan = PLANS[name]
    params, batches = drawn(3), [integers(8, 3, seed=step) for step in range(4)]
    optimizer = fp.optim.adamw(0.05)
    for last in (fp.local_sgd("data", inner=2), fp.diloco("data", inner=2)):
        found, losses = trained(fp.train_step(loss, optimizer, mesh, fp.chain(plan, last), clip=0.5), params, batches)
        same, said = trained(fp.train_step(loss, optimizer, Mesh(data=2), last, clip=0.5), params, batches)
        assert_close(found, same)
        assert_close([each for each in losses if each is not None], [each for each in said if each is not None])


def test_a_run_goes_on_from_the_middle_of_a_round() -> None:
    params, batches = drawn(0), [integers(4, 3, seed=step) for step in range(6)]
    make = lambda: fp.train_step(loss, fp.optim.adamw(0.05), Mesh(data=2), fp.diloco("data", inner=3))  # noqa: E731
    train, other = make(), make()
    state = train.init(lambda: optree.tree_map(torch.clone, params))
    for batch in batches[:4]:
        state, _ = train(state, batch)
    again = other.load(*train.whole(state), state.step)
    for batch in batches[4:]:
        state, metrics = train(state, batch)
        again, others = other(again, batch)
    assert_equal(train.whole(state), other.whole(again))
    assert_equal(metrics.loss, others.loss)


def test_a_synchronous_run_goes_on_with_replicas() -> None:
    mesh, params = Mesh(data=2), drawn(0)
    before = fp.train_step(loss, fp.optim.adamw(0.05), mesh, fp.data_parallel("data"))
    state, _ = before(before.init(params), integers(4, 3, seed=0))
    train = fp.train_step(loss, fp.optim.adamw(0.05), mesh, fp.local_sgd("data", inner=2))
    went_on = train.load(*before.whole(state), state.step)
    assert_equal(train.params(went_on), before.params(state))
    went_on, metrics = train(went_on, integers(4, 3, seed=1))
    assert metrics.loss is not None  # the step after it is a multiple of two
    with pytest.raises(ValueError, match="does not belong to these parameters"):
        before.load(*train.whole(went_on), 2)


def test_evaluation_is_on_the_parameters_of_the_last_exchange() -> None:
    plan = fp.local_sgd("data", inner=2)
    train = fp.train_step(loss, fp.optim.sgd(0.1), Mesh(data=2), plan)
    state, _ = train(train.init(drawn(0)), integers(4, 3, seed=0))
    predict, x = train.compile(plan(lambda params, x: x @ params["w"])), integers(4, 3, seed=1)
    assert_equal(predict(state, x), x @ drawn(0)["w"])
    whole = fp.compile(fp.grad(plan(loss)), Mesh(data=2))(drawn(0), x)
    assert_close(whole, torch.func.grad(loss)(drawn(0), x))


def test_replicas_draw_other_numbers() -> None:
    def noisy(w: Tensor, x: Tensor) -> Tensor:
        return (F.dropout(torch.ones_like(x), 0.5, True) * w).sum()

    train = fp.train_step(noisy, fp.optim.sgd(1.0), Mesh(data=2), fp.local_sgd("data", inner=2), seed=0)
    state, _ = train(train.init(torch.zeros(64)), torch.zeros(2, 64))
    _, held = train.whole(state)
    assert not torch.equal(held.params[0], held.params[1])


def test_replicas_with_optimizers_by_path() -> None:
    """A moment has the number 0 for the parameters of other groups, which has no rows."""
    groups = fp.optim.by_path({"w": fp.optim.adamw(0.05), "*": fp.optim.sgd(0.05, momentum=0.5)})
    batches = [integers(4, 3, seed=step) for step in range(2)]
    train = fp.train_step(loss, groups, Mesh(data=2), fp.local_sgd("data", inner=2))
    found, _ = trained(train, drawn(0), batches)
    assert_close(found, by_hand(loss, drawn(0), batches, 2, 2, groups, None))


def test_what_does_not_go_together_is_refused() -> None:
    mesh, local = Mesh(data=2, pipe=2), fp.local_sgd("data", inner=2)
    make = lambda plan, **options: fp.train_step(loss, fp.optim.sgd(0.1), mesh, plan, **options)  # noqa: E731
    for inner in (0, True, 1.5):
        with pytest.raises(ValueError, match="inner is the number of steps"):
            fp.local_sgd("data", inner=inner)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="outer optimizer updates shards"):
        fp.diloco("data", inner=2, outer=fp.optim.adafactor(0.1))
    with pytest.raises(fp.OrderError, match="belongs inside it"):
        fp.chain(local, fp.data_parallel("pipe"))
    with pytest.raises(ValueError, match=r"do not go with has_aux=True: each replica has"):
        make(local, has_aux=True)
    with pytest.raises(ValueError, match=r"layout='flat'"):
        make(fp.chain(fp.zero(1, "pipe", layout="flat"), local))
    with pytest.raises(ValueError, match=r"do not go with fp.pipeline"):
        make(fp.chain(fp.pipeline("pipe", microbatches=2), local))


# --- Masters ---


def precise(params: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"]) @ params["v"] + params["norm"]).square().mean()


def begun() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(4, 4, generator=draw) / 2 for name in ("w", "v")} | {"norm": torch.full((4,), 0.3)}


def inputs(count: int, scale: float = 1.0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=draw) * scale for _ in range(count)]


def loop_with_masters(
    batches: list[Tensor], inner: int, dtype: torch.dtype, optimizer: Any, outer: Any, rules: fp.LossScale | None
) -> tuple[Any, list[Any], list[list[bool]]]:
    """Two independent replicas, each with float32 masters and a loss scale of its own: anchor, masters, and skips."""
    plan = fp.mixed_precision("fp16" if dtype == torch.float16 else "bf16", loss_scale=None, keep=["norm"])
    local, of_one = plan(precise), {"in_specs": (P(),) * 3, "out_specs": P()}
    compute = fp.compile(fp.grad(lambda p, x, factor: local(p, x) * factor), Mesh(one=1), **of_one)  # type: ignore[arg-type]
    anchor, masters = begun(), [begun()] * 2
    states, outer_state = [optimizer.init(anchor)] * 2, None if outer is None else outer.init(anchor)
    scales, skips = [rules.init() if rules else None] * 2, []
    for number, batch in enumerate(batches, 1):
        row = []
        for rank, part in enumerate(batch.chunk(2)):
            scale = scales[rank]
            factor = torch.ones(()) if scale is None else scale.scale.float()
            rounded = {name: x if name == "norm" else x.to(dtype).float() for name, x in masters[rank].items()}
            grads = optree.tree_map(lambda g: g / factor, compute(rounded, part, factor))  # noqa: B023
            overflow = not all(bool(g.isfinite().all()) for g in grads.values())
            row.append(overflow)
            if not overflow:
                masters[rank], states[rank] = optimizer.update(grads, states[rank], masters[rank])
            if rules is not None:
                scales[rank] = rules.update(scale, torch.tensor(overflow))
        skips.append(row)
        if number % inner == 0:
            mean = optree.tree_map(lambda a, b: (a + b) / 2, *masters)
            if outer is not None:
                difference = optree.tree_map(torch.sub, anchor, mean)
                mean, outer_state = outer.update(difference, outer_state, anchor)
            anchor, masters = mean, [mean] * 2
    return anchor, masters, skips


WITHIN: dict[str, tuple[Mesh, list[Any]]] = {
    "alone": (Mesh(data=2), []),
    "masters sharded": (Mesh(data=2, shard=2), [fp.zero(1, "shard")]),
    "all sharded": (Mesh(data=2, shard=2), [fp.zero(3, "shard")]),
    "uneven": (Mesh(data=2, shard=3), [fp.zero(2, "shard", batch=P())]),
}
OUTER = {"local_sgd": None, "diloco": NESTEROV}


def with_masters(within: str, kind: str, precision: Any, optimizer: Any, **options: Any) -> Any:
    mesh, inside = WITHIN[within]
    local = fp.local_sgd("data", inner=2) if kind == "local_sgd" else fp.diloco("data", inner=2, outer=NESTEROV)
    return fp.train_step(precise, optimizer, mesh, fp.chain(precision, *inside, local), **options)


@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("kind", OUTER)
def test_replicas_with_masters(within: str, kind: str) -> None:
    """They were refused. What is averaged are the masters, in float32."""
    optimizer = fp.optim.adamw(0.02)
    train = with_masters(within, kind, fp.mixed_precision("bf16", keep=["norm"]), optimizer)
    state = train.init(begun())
    for number, x in enumerate(batches := inputs(4), 1):
        state, metrics = train(state, x)
        wanted, _, _ = loop_with_masters(batches[:number], 2, torch.bfloat16, optimizer, OUTER[kind], None)
        found = train.params(state)
        assert all(leaf.dtype == torch.float32 for leaf in found.values())
        torch.testing.assert_close(found, wanted, rtol=0, atol=3e-4 if number > 1 else 0)
        assert (metrics.loss is None) == (number % 2 == 1)
    params, optimizer_state = train.whole(state)
    held = optimizer_state.optimizer.masters
    assert torch.equal(held["w"][0], params["w"]) and torch.equal(held["w"][1], params["w"])
    assert optimizer_state.params["w"].dtype == torch.bfloat16 and optimizer_state.params["norm"].dtype == torch.float32
    assert not torch.equal(params["w"], params["w"].bfloat16().float())


def test_the_exchange_of_masters_is_of_their_shards() -> None:
    """Between the replicas go the shards of the masters and the loss; nothing goes in an inner step."""
    train = with_masters("masters sharded", "local_sgd", fp.mixed_precision("bf16"), fp.optim.adamw(0.02), bucket=None)
    state, between = train.init(begun()), []
    for x in inputs(2):
        state, _ = train(state, x)
        between.append([one for one in train.program.collectives() if "data" in one.axes])
    assert [str(one.operand) for one in between[0]] == []
    assert sorted(str(one.operand) for one in between[1]) == ["f32[2, 4]", "f32[2, 4]", "f32[2]", "f64[]"]


def skewed(count: int) -> list[Tensor]:
    """Batches of which the second replica's half overflows first."""
    return [torch.cat([x[:4] / 20, x[4:] * 64]) for x in inputs(count)]


@pytest.mark.parametrize("within", ["alone", "masters sharded"])
@pytest.mark.parametrize("kind", OUTER)
def test_a_replica_that_skips_takes_part_in_the_exchange(within: str, kind: str) -> None:
    rules = fp.LossScale(2.0**18, window=3, hysteresis=1)
    optimizer = fp.optim.sgd(0.01, momentum=0.5)
    precision = fp.mixed_precision("fp16", keep=["norm"], loss_scale=rules)
    train = with_masters(within, kind, precision, optimizer)
    state, batches = train.init(begun()), skewed(6)
    wanted, _, skips = loop_with_masters(batches, 2, torch.float16, optimizer, OUTER[kind], rules)
    for number, x in enumerate(batches, 1):
        state, metrics = train(state, x)
        if number % 2 == 0:
            assert bool(metrics.skipped) == all(skips[number - 2] + skips[number - 1])
    assert any(one != other for one, other in skips), "a step that one replica skips"
    torch.testing.assert_close(train.params(state), wanted, rtol=0, atol=2e-4)
    scales = train.whole(state)[1].optimizer.loss_scale.scale
    assert scales.shape == (2,) and scales[0] > scales[1]
    train.check(state)


@pytest.mark.parametrize("kind", OUTER)
@pytest.mark.parametrize("way", ["loaded", "restored"])
def test_a_run_with_masters_goes_on_from_the_middle_of_a_round(kind: str, way: str, tmp_path: Path) -> None:
    def made() -> Any:
        return with_masters("masters sharded", kind, fp.mixed_precision("fp16"), fp.optim.adamw(0.02))

    train, again = made(), made()
    state = train.init(begun())
    for x in inputs(3):
        state, _ = train(state, x)
    if way == "restored":
        train.save(state, tmp_path)
        taken = again.restore(tmp_path)
    else:
        taken = again.load(*train.whole(state), state.step)
    for x in inputs(3):
        (state, one), (taken, other) = train(state, x), again(taken, x)
        assert (one.loss is None and other.loss is None) or torch.equal(one.loss, other.loss)
    assert_equal(again.params(taken), train.params(state))
    assert_equal(again.whole(taken)[1].optimizer, train.whole(state)[1].optimizer)


def masters_on_a_process(rank: int) -> Any:
    train = with_masters("alone", "diloco", fp.mixed_precision("fp16"), fp.optim.adamw(0.05), reduction="ordered")
    return trained(train, begun(), skewed(4))


def test_masters_on_processes() -> None:
    wanted = masters_on_a_process(0)
    for found in run_on_processes(masters_on_a_process, 2):
        assert_equal(found, wanted)


def on_a_process(rank: int, own: bool) -> Any:
    results = []
    for plan in (fp.local_sgd("data", inner=2), fp.diloco("data", inner=3)):
        train = fp.train_step(loss, fp.optim.adamw(0.05), Mesh(data=2), plan, batch="own" if own else "global")
        batches = [integers(4, 3, seed=step) for step in range(6)]
        results.append(trained(train, drawn(0), [each.chunk(2)[rank] if own else each for each in batches]))
    return results


@pytest.mark.parametrize("own", [False, True])
def test_processes_equal_simulated_ranks(own: bool) -> None:
    expected = on_a_process(0, False)
    for found in run_on_processes(on_a_process, 2, own):
        assert_close(found, expected)
