"""Asynchronous methods on simulated ranks: bounded, replayed exactly, and at staleness 0 synchronous training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_parallel as fp
from functional_parallel.asynchronous import AsyncMetrics, AsyncState, Clock
from sharding_specs import Mesh

from ..trees import assert_close, assert_equal
from .models import batches_of, drawn, integers, mean_loss, sum_loss, synchronous

SGD = fp.optim.sgd(0.25, momentum=0.5)
METHODS = ["server", "rotating"]


def made(method: str, ranks: int, staleness: int, loss: Any = sum_loss, optimizer: Any = SGD, **options: Any) -> Any:
    options.setdefault("reduce", "sum" if loss is sum_loss else "mean")
    make = fp.asynchronous.parameter_server if method == "server" else fp.asynchronous.rotating_server
    return make(loss, optimizer, Mesh(data=ranks), staleness=staleness, **options)


def run(step: Any, params: Any, batches: list[list[Tensor]]) -> tuple[AsyncState, list[AsyncMetrics]]:
    """Every rank takes its batches in order, when the clock says."""
    state, done = step.init(params), list[AsyncMetrics]()
    taken = dict.fromkeys(range(len(batches[0])), 0)
    while state.ready and taken[state.rank] < len(batches):
        rank = state.rank
        state, metrics = step(state, batches[taken[rank]][rank])
        taken[rank] += 1
        done.append(metrics)
    return state, done


@settings(max_examples=15, deadline=None)
@given(
    method=st.sampled_from(METHODS),
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    width=st.integers(1, 4),
    jitter=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
def test_without_staleness_it_is_synchronous_training(
    method: str, sizes: list[int], width: int, jitter: float, seed: int
) -> None:
    """Exactly, whatever the ranks' pace and the sizes of their batches."""
    params, batches = drawn(seed, width), batches_of(sizes, 2, seed)
    seconds = tuple(1.0 + 3 * (rank % 2) for rank in range(len(sizes)))
    step = made(method, len(sizes), 0, clock=Clock(seconds, jitter, seed))
    state, done = run(step, params, batches)
    assert len(done) == 2 * len(sizes)
    assert {each.staleness for each in done} <= {None, 0}
    assert_equal(step.params(step.finish(state)), synchronous(sum_loss, params, SGD, batches))


@pytest.mark.parametrize("method", METHODS)
def test_means_are_of_all_samples_and_any_optimizer_will_do(method: str) -> None:
    params, batches = drawn(0), batches_of([1, 3, 2], 4, 0)
    for optimizer in (fp.optim.adamw(0.05), fp.optim.adafactor(0.05)):
        step = made(method, 3, 0, mean_loss, optimizer)
        state, _ = run(step, params, batches)
        assert_close(step.params(step.finish(state)), synchronous(mean_loss, params, optimizer, batches))


@settings(max_examples=6, deadline=None)
@given(ranks=st.sampled_from([1, 2, 4]), inner=st.integers(1, 3), momentum=st.booleans(), seed=st.integers(0, 1000))
def test_with_inner_steps_it_is_diloco(ranks: int, inner: int, momentum: bool, seed: int) -> None:
    """The server's method with an outer optimizer and no staleness is the plan of `fp.diloco`, exactly."""
    outer = fp.optim.sgd(0.5, momentum=0.5, nesterov=True) if momentum else fp.optim.sgd(1.0)
    params, batches = drawn(seed), batches_of([2] * ranks, 2 * inner, seed)
    step = made("server", ranks, 0, mean_loss, SGD, inner=inner, outer=outer)
    state, _ = run(step, params, batches)
    plan = fp.diloco("data", inner=inner, outer=outer)
    train = fp.train_step(mean_loss, SGD, Mesh(data=ranks), plan, nonfinite="continue")
    trained = train.init(params)
    for parts in batches:
        trained, _ = train(trained, torch.cat(parts))
    assert_equal(step.params(step.finish(state)), train.params(trained))


@settings(max_examples=10, deadline=None)
@given(
    ranks=st.integers(1, 4),
    bound=st.integers(0, 9),
    slow=st.sampled_from([1.0, 5.0]),
    seed=st.integers(0, 1000),
)
def test_staleness_is_measured_and_bounded(ranks: int, bound: int, slow: float, seed: int) -> None:
    clock = Clock((slow, *[1.0] * (ranks - 1)), 0.2, seed)
    step = made("server", ranks, bound, mean_loss, fp.optim.sgd(0.001), clock=clock)
    state, ages = step.init(drawn(0)), []
    for number in range(12 * ranks):
        before = {rank: state.work[rank].version for rank in state.ready}
        rank, version = state.rank, state.nodes[0].weights[0]
        state, metrics = step(state, integers(2, 3, seed=number))
        if metrics.staleness is not None and not state.waiting and len(before) == ranks:
            assert metrics.staleness == version - before[rank]
        ages.append(metrics.staleness)
    assert max(age for age in ages if age is not None) <= bound
    if bound >= 5 * ranks:
        assert not any(state.waiting)


def test_a_slow_rank_delays_no_other_within_the_bound() -> None:
    """Own steps per second of the fast ranks: with the bound of the docs all of them, synchronously a fifth."""

    def share(step: Any) -> float:
        state = step.init(drawn(0))
        while state.seconds < 100:
            state, _ = step(state, integers(2, 3, seed=0))
        return min(state.work[rank].steps for rank in (0, 1)) / 100

    clock, optimizer = Clock((1.0, 1.0, 5.0), 0.1, 0), fp.optim.sgd(1e-4)
    for step in (made("server", 3, 12, mean_loss, optimizer, clock=clock), made("rotating", 3, 3, clock=clock)):
        assert share(step) > 0.95
    for method in METHODS:
        assert 0.15 < share(made(method, 3, 0, mean_loss, optimizer, clock=clock)) < 0.25


@pytest.mark.parametrize("method", METHODS)
def test_a_run_replays_exactly_from_any_state(method: str) -> None:
    step = made(method, 3, 6, mean_loss, fp.optim.adamw(0.05), clock=Clock((1.0, 1.5, 4.0), 0.3, 7))

    def go_on(state: AsyncState, steps: range) -> tuple[AsyncState, list[Any]]:
        told = []
        for number in steps:
            state, metrics = step(state, integers(2, 3, seed=number))
            told.append((metrics.rank, metrics.version, metrics.staleness, metrics.seconds, metrics.loss.item()))
        return state, told

    middle, _ = go_on(step.init(drawn(0)), range(10))
    first, told = go_on(middle, range(10, 30))
    again, same = go_on(middle, range(10, 30))
    assert told == same
    assert_equal(step.params(first), step.params(again))
    other = made(method, 3, 6, mean_loss, fp.optim.adamw(0.05), clock=Clock((1.0, 1.5, 4.0), 0.3, 8))
    state = other.init(drawn(0))
    ranks = []
    for number in range(30):
        state, metrics = other(state, integers(2, 3, seed=number))
        ranks.append(metrics.seconds)
    assert ranks[10:] != [each[3] for each in told]


def test_only_the_turns_weights_change() -> None:
    """The published method: gradients of the others are used, and their weights stay."""
    step = made("rotating", 3, 3, clock=Clock(1.0, 0.0), optimizer=fp.optim.sgd(1.0))
    state, batches = step.init(drawn(0)), [integers(1, 3, seed=rank) for rank in range(3)]
    gradients = [torch.func.grad(sum_loss)(drawn(0), batch) for batch in batches]
    state, metrics = step(state, batches[0])  # rank 0 has the turn, and no other gradient is there yet
    assert (metrics.rank, metrics.version, metrics.staleness) == (0, 1, 0)
    after = {rank: state.nodes[rank].weights[1]["w"] for rank in range(3)}
    assert_equal(after[0], drawn(0)["w"] - gradients[0]["w"])
    assert_equal([after[1], after[2]], [drawn(0)["w"]] * 2)
    state, _ = step(state, batches[1])  # now rank 1 has it
    state, metrics = step(state, batches[2])  # and rank 2
    assert [state.nodes[rank].weights[0] for rank in range(3)] == [1, 2, 3]
    state, _ = step(state, batches[1] * 0)  # rank 0's turn again


@pytest.mark.parametrize(("method", "staleness"), [("server", 0), ("server", 4), ("rotating", 0), ("rotating", 4)])
def test_the_others_go_on_when_a_rank_dies(method: str, staleness: int) -> None:
    step = made(method, 4, staleness, mean_loss, fp.optim.sgd(0.01))
    state, _ = step(step.init(drawn(0)), integers(2, 3, seed=0))
    for dead in (2, 1):
        state = step.drop(state, dead)
        for number in range(12):
            state, metrics = step(state, integers(2, 3, seed=number))
    assert metrics.ended == ("rank 1 (data=1) died", "rank 2 (data=2) died")
    assert {rank for rank in state.work} == {0, 3}
    assert all(each.steps > 5 for each in state.work.values())
    step.finish(state)


def test_a_dead_server_ends_the_run_and_a_dead_holder_does_not() -> None:
    step = made("server", 3, 4)
    with pytest.raises(fp.CollectiveError, match="rank 0, the parameter server, died"):
        step.drop(step.init(drawn(0)), 0)
    turns = made("rotating", 3, 0)
    state = turns.drop(turns.init(drawn(0)), 0)  # it has the first turn
    for number in range(4):
        state, _ = turns(state, integers(2, 3, seed=number))
    assert state.nodes[1].weights[0] == state.nodes[2].weights[0] > 1


def test_a_plan_without_axes_and_a_batch_of_several_arguments() -> None:
    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return ((x @ params["w"] - y) ** 2).mean()

    params = {"w": integers(3, 2, seed=0), "steps": 3}
    x, y = integers(4, 3, seed=1), integers(4, 2, seed=2)
    step = fp.asynchronous.parameter_server(loss, SGD, Mesh(data=1), fp.remat(), staleness=0)
    state, metrics = step(step.init(params), x, y)
    expected = SGD.update(
        torch.func.grad(lambda w: loss({"w": w}, x, y))(params["w"]), SGD.init(params["w"]), params["w"]
    )
    assert_close(step.params(state)["w"], expected[0])
    assert step.params(state)["steps"] == 3
    assert_close(metrics.loss, loss(params, x, y))


def test_a_loss_that_is_not_finite_is_sent_to_nobody() -> None:
    step = made("server", 2, 1, mean_loss)
    state = step.init(drawn(0))
    with pytest.raises(fp.NonFiniteError, match=r"step 0 of rank 1 \(data=1\) is not finite: loss nan"):
        step(state, integers(2, 3, seed=0) * torch.nan)
    state, metrics = step(state, integers(2, 3, seed=0))
    assert metrics.version == 1


def test_bad_arguments_are_refused() -> None:
    server, rotating = fp.asynchronous.parameter_server, fp.asynchronous.rotating_server
    mesh = Mesh(data=2)
    for bound in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match="the bound is a number of updates, an integer of at least 0"):
            server(sum_loss, SGD, mesh, staleness=bound)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0, or at least 2, the number of ranks"):
        rotating(sum_loss, SGD, mesh, staleness=1)
    with pytest.raises(ValueError, match=r"server=2\): it is a rank"):
        server(sum_loss, SGD, mesh, staleness=1, server=2)
    with pytest.raises(ValueError, match="more than 1 need outer="):
        server(sum_loss, SGD, mesh, staleness=1, inner=2)
    with pytest.raises(ValueError, match="it is 'mean' or 'sum'"):
        rotating(sum_loss, SGD, mesh, reduce="max")
    with pytest.raises(ValueError, match="splits work over 'data'"):
        server(sum_loss, SGD, mesh, fp.data_parallel("data"), staleness=1)
    with pytest.raises(TypeError, match=r"takes an optimizer from fp\.optim"):
        server(sum_loss, torch.optim.SGD, mesh, staleness=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="3 numbers of seconds for 2 ranks"):
        server(sum_loss, SGD, mesh, staleness=1, clock=Clock((1.0, 1.0, 1.0)))
    for seconds, jitter in ((0.0, 0.1), ((), 0.1), (1.0, 1.0), (1.0, -0.1)):
        with pytest.raises(ValueError, match=r"seconds are positive|jitter is a number"):
            Clock(seconds, jitter)
    step = server(sum_loss, SGD, mesh, staleness=1)
    with pytest.raises(TypeError, match="takes a state from its init"):
        step(drawn(0), integers(2, 3, seed=0))
    state = step.finish(step.init(drawn(0)))
    with pytest.raises(ValueError, match="this run is finished"):
        step(state, integers(2, 3, seed=0))
    with pytest.raises(ValueError, match="rank 5 does not take part"):
        step.drop(step.init(drawn(0)), 5)
