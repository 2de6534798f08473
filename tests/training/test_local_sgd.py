"""Local SGD and DiLoCo are what their papers say, written as a loop over replicas; and send nothing in between."""

from __future__ import annotations

from collections.abc import Callable
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
    with pytest.raises(ValueError, match=r"do not go with parameters stored in float16"):
        make(fp.chain(fp.mixed_precision("fp16"), local))


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
