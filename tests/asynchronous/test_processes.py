"""Asynchronous methods on gloo processes: nobody waits for a slow rank, the dead are named, and nothing hangs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.asynchronous.session import decoded, encoded
from functional_parallel.ir import memory_of
from sharding_specs import Mesh

from ..processes import run_on_processes
from ..trees import assert_equal
from .models import batches_of, drawn, integers, mean_loss, sum_loss, synchronous

SGD = fp.optim.sgd(0.25, momentum=0.5)
SECONDS = 0.03  # of a step of a fast rank, beside its computation


def made(method: str, ranks: int, staleness: int, loss: Any = sum_loss, optimizer: Any = SGD, **options: Any) -> Any:
    make = fp.asynchronous.parameter_server if method == "server" else fp.asynchronous.rotating_server
    reduce = "sum" if loss is sum_loss else "mean"
    return make(loss, optimizer, Mesh(data=ranks), staleness=staleness, reduce=reduce, **options)


def without_staleness(rank: int, method: str, sizes: list[int], seed: int) -> Any:
    step = made(method, len(sizes), 0)
    state = step.init(drawn(seed))
    for parts in batches_of(sizes, 3, seed):
        state, metrics = step(state, parts[rank])
        assert metrics.staleness in (0, None)
        time.sleep(0.01 * rank)
    return step.params(step.finish(state))


@pytest.mark.parametrize("method", ["server", "rotating"])
def test_without_staleness_it_is_synchronous_training(method: str) -> None:
    for sizes, seed in (([1, 3, 2], 0), ([2, 1], 5)):
        expected = synchronous(sum_loss, drawn(seed), SGD, batches_of(sizes, 3, seed))
        for found in run_on_processes(without_staleness, len(sizes), method, sizes, seed):
            assert_equal(found, expected)


def inner_steps(rank: int) -> Any:
    outer = fp.optim.sgd(0.5, momentum=0.5, nesterov=True)
    step = made("server", 2, 0, mean_loss, inner=2, outer=outer)
    state, batches = step.init(drawn(0)), batches_of([2, 2], 4, 0)
    for parts in batches:
        state, _ = step(state, parts[rank])
    train = fp.train_step(mean_loss, SGD, Mesh(data=2), fp.diloco("data", inner=2, outer=outer), nonfinite="continue")
    trained = train.init(drawn(0))
    for parts in batches:
        trained, _ = train(trained, torch.cat(parts))
    return step.params(step.finish(state)), train.params(trained)


def test_inner_steps_are_diloco() -> None:
    for found, expected in run_on_processes(inner_steps, 2):
        assert_equal(found, expected)


def pace(rank: int, method: str, staleness: int, slow: int) -> tuple[int, float, int]:
    """Steps in a second and a half, by a rank whose own step takes so long; and the largest staleness."""
    step = made(method, 3, staleness, mean_loss, fp.optim.sgd(1e-4))
    state, x = step.init(drawn(0)), integers(2, 3, seed=rank)
    state, _ = step(state, x)
    began, done, oldest = time.monotonic(), 0, 0
    while time.monotonic() - began < 1.5:
        time.sleep(SECONDS * (5 if rank == slow else 1))
        state, metrics = step(state, x)
        done, oldest = done + 1, max(oldest, metrics.staleness or 0)
    seconds = time.monotonic() - began
    step.finish(state)
    return done, seconds, oldest


@pytest.mark.parametrize(("method", "staleness"), [("server", 20), ("rotating", 3)])
def test_a_slow_rank_delays_no_other(method: str, staleness: int) -> None:
    """The waits of this test leave room for a busy machine; `benchmarks/asynchronous.py` measures the share itself."""
    found = run_on_processes(pace, 3, method, staleness, 2)
    fast = [done / seconds for done, seconds, _ in found[:2]]
    slow = found[2][0] / found[2][1]
    assert min(fast) > 2.5 * slow, found
    assert max(oldest for *_, oldest in found) <= staleness
    together = run_on_processes(pace, 3, method, 0, 2)
    assert max(done for done, *_ in together) < 1.5 * together[2][0] + 2, together


def until_the_end(rank: int, method: str, staleness: int, dies: int) -> Any:
    step = made(method, 3, staleness, mean_loss, fp.optim.sgd(1e-4))
    state, x = step.init(drawn(0)), integers(2, 3, seed=rank)
    for number in range(12):
        if rank == dies and number == 4:
            os._exit(3)
        time.sleep(0.01)
        try:
            state, _ = step(state, x)
        except fp.CollectiveError as error:
            return str(error)
    began = time.monotonic()
    try:
        state = step.finish(state)
    except fp.CollectiveError as error:
        return str(error)
    return step.ended(state), state.step, time.monotonic() - began, step.params(state)


@pytest.mark.parametrize(
    ("method", "staleness", "dies"),
    [("server", 0, 1), ("server", 30, 2), ("rotating", 0, 0), ("rotating", 0, 1), ("rotating", 3, 2)],
)
def test_a_rank_that_dies_is_named_and_stops_no_other(method: str, staleness: int, dies: int) -> None:
    found = run_on_processes(until_the_end, 3, method, staleness, dies, timeout=60.0, deaths=True)
    assert found[dies] == 3
    others = [each for rank, each in enumerate(found) if rank != dies]
    for ended, steps, seconds, _ in others:
        assert steps == 12
        assert f"rank {dies} (data={dies}) died" in ended
        assert seconds < 20
    assert_equal(others[0][3], others[1][3])


@pytest.mark.parametrize("staleness", [0, 30])
def test_a_dead_server_is_an_error_on_all_ranks(staleness: int) -> None:
    began = time.monotonic()
    found = run_on_processes(until_the_end, 3, "server", staleness, 0, timeout=60.0, deaths=True)
    assert found[0] == 3
    for text in found[1:]:
        assert "rank 0 (data=0), the parameter server, died" in text
    assert time.monotonic() - began < 50


def leaves_early(rank: int, method: str, staleness: int) -> Any:
    step = made(method, 3, staleness, mean_loss, fp.optim.sgd(1e-4))
    state, x = step.init(drawn(0)), integers(2, 3, seed=rank)
    for _ in range(3 if rank == 1 else 9):
        state, _ = step(state, x)
    after = step.finish(state)
    with pytest.raises(ValueError, match="this run is finished"):
        step(after, x)
    return step.ended(after), step.params(after)


@pytest.mark.parametrize(("method", "staleness"), [("server", 0), ("server", 30), ("rotating", 0), ("rotating", 3)])
def test_a_rank_may_leave(method: str, staleness: int) -> None:
    found = run_on_processes(leaves_early, 3, method, staleness)
    for _, params in found[1:]:
        assert_equal(params, found[0][1])
    assert "rank 1 (data=1) left" in found[0][0]
    assert not any("died" in each for ended, _ in found for each in ended)


def misused(rank: int) -> list[str]:
    said = []
    step = made("server", 2, rank)
    try:
        step.init(drawn(0))
    except fp.CallMismatchError as error:
        said.append(str(error))
    step = made("server", 2, 1)
    try:
        step.init(drawn(rank))
    except fp.errors.InputMismatchError as error:
        said.append(str(error))
    state = step.init(drawn(0))
    after, _ = step(state, integers(2, 3, seed=0))
    try:
        step(state, integers(2, 3, seed=0))
    except fp.DonatedStateError as error:
        said.append(str(error))
    try:
        step.drop(after, 1)
    except ValueError as error:
        said.append(str(error))
    step.finish(after)
    return said


def test_misuse_is_an_error_on_every_rank() -> None:
    for said in run_on_processes(misused, 2):
        assert [
            word in text
            for word, text in zip(
                ("staleness=0", "different b, w", "other ranks have gone on", "simulated ranks"), said, strict=True
            )
        ] == [True] * 4, said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.bool])
def test_tensors_travel_as_they_are(dtype: torch.dtype) -> None:
    tree: dict[str, Any] = {
        "a": torch.arange(7).to(dtype),
        "b": (torch.ones(2, 3).to(dtype).T, None, "text"),
        "c": torch.empty(0, 3, dtype=dtype),
        "d": torch.ones((), dtype=dtype),
    }
    described, tensors = encoded(tree)
    like = {**tree, "a": torch.zeros(1), "d": torch.zeros(2)}
    found = decoded(described, [bytearray(memory_of(x)) for x in tensors], like)
    assert_equal([x for x in found["b"] if isinstance(x, Tensor)], [tree["b"][0]])
    for key in "acd":
        assert found[key].dtype == dtype
        assert torch.equal(found[key], tree[key])
