"""Ranks that wait in vain: the watch ends their waits within 30 s, with one message that names both sides.

Ranks stay alive after their errors, so no wait ends because a process did.
"""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel import _torch
from functional_parallel.runtime import ProcessRuntime, use_runtime
from functional_parallel.runtime.calls.waits import Lost
from functional_parallel.runtime.watch.board import Board
from sharding_specs import Mesh
from tests.processes import outcome, run_on_processes

from .test_hosts import on_hosts

X = torch.arange(16, dtype=torch.float64).reshape(4, 4) % 5
Outcome = tuple[str, str, float]


def training(mesh: Mesh, plan: Any, algorithm: str) -> Any:
    """Return a function that takes a step on a batch, after two steps that all ranks took."""
    use_runtime(ProcessRuntime(mesh, timeout=120, algorithm=algorithm))
    train = fp.train_step(lambda p, x: ((x @ p["w"]) ** 2).mean(), fp.optim.sgd(0.1), mesh, plan)
    state = [train.init({"w": torch.eye(4, dtype=torch.float64)})]

    def step(x: torch.Tensor = X) -> None:
        state[0], _ = train(state[0], x)

    step()
    step()
    return step


def stay_alive(ranks: int) -> None:
    """Return when so many ranks have an outcome."""
    store, deadline = _torch.store_of_all_ranks(), time.monotonic() + 40
    store.add("outcomes", 1)
    while store.add("outcomes", 0) < ranks and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(0.5)  # rank 0 serves the store


# -----------------------------------------------------------------------------
# Different calls
# -----------------------------------------------------------------------------


def on_a_batch_of_another_shape(rank: int, algorithm: str, hosts: str) -> Outcome:
    on_hosts(hosts)
    step = training(Mesh(data=2), fp.zero(3, "data"), algorithm)
    found = outcome(lambda: step(X[: 4 - 2 * rank]))
    stay_alive(2)
    return found


@pytest.mark.parametrize(
    ("algorithm", "hosts"),
    [("backend", "aa"), ("shared", "aa"), ("auto", "ab")],
)
def test_a_batch_of_another_shape_on_one_rank(algorithm: str, hosts: str) -> None:
    """Rank 1 traces the step again and compares inputs, while rank 0 waits in the step's first collective."""
    results = run_on_processes(on_a_batch_of_another_shape, 2, algorithm, hosts)
    for kind, message, seconds in results:
        assert kind == "CallMismatchError" and seconds < 30, (kind, message, seconds)
        assert "the ranks are doing different things" in message and "a batch of another shape" in message, message
        assert "rank 0 (data=0) runs train_step" in message and "test_watch.py" in message, message
        assert "rank 1 (data=1) meets the others to compare inputs" in message, message


def on_a_call_that_one_rank_leaves(rank: int) -> Outcome:
    mesh = Mesh(data=2)
    step = training(mesh, fp.zero(3, "data"), "backend")
    if rank:
        from functional_parallel.runtime import default_runtime

        def fail(*_: Any) -> Any:
            raise MemoryError("no room for the step")

        default_runtime(mesh)._run = fail  # as where a kernel finds no memory
    try:
        found = outcome(step)
    except MemoryError as error:
        found = "MemoryError", str(error), 0.0
    stay_alive(2)
    return found


def test_a_call_that_one_rank_leaves_by_an_error() -> None:
    (kind, message, seconds), (other, _, _) = run_on_processes(on_a_call_that_one_rank_leaves, 2)
    assert other == "MemoryError" and kind == "CollectiveError" and seconds < 30, message
    assert "rank 1 (data=1) left this call by an error, MemoryError: no room for the step" in message, message
    assert "rank 0 (data=0) runs train_step" in message and "test_watch.py" in message, message


def on_a_rank_that_ends_early(rank: int) -> Outcome:
    step = training(Mesh(data=2), fp.zero(3, "data"), "backend")
    if rank == 0:
        torch.distributed.destroy_process_group()
        time.sleep(10)
        os._exit(18)
    return outcome(step)


def test_a_step_more_on_one_rank_than_on_rank_0() -> None:
    _, (kind, message, seconds) = run_on_processes(on_a_rank_that_ends_early, 2, deaths=True)
    assert kind == "CollectiveError" and seconds < 30, message
    assert "rank 0 (data=0)" in message and "destroy_process_group" in message, message


# -----------------------------------------------------------------------------
# The rules by which waits are ended
# -----------------------------------------------------------------------------


def position(rank: int, calls: list[str], ranks: list[int]) -> dict[str, Any]:
    return {"me": f"rank {rank}", "ranks": ranks, "place": "psum", "count": len(calls), "calls": calls}


def test_ranks_in_one_call_or_behind_are_left_alone() -> None:
    """A long transfer, and a rank that waits in an earlier call for one that computes, only take long."""
    board = Board(3)
    board.waits(0, position(0, ["a", "b"], [0, 1]), 0.0)
    board.waits(1, position(1, ["a", "b"], [0, 1]), 0.0)
    assert board.judge(1000.0) is None
    board.waits(1, position(1, ["a"], [1, 2]), 0.0)
    assert board.judge(1000.0) is None
    board.waits(0, None, 1000.0)
    board.waits(1, None, 1000.0)
    assert board.judge(2000.0) is None


def test_the_first_call_that_differs_is_named() -> None:
    board = Board(2)
    board.waits(0, position(0, ["a", "b", "c"], [0, 1]), 0.0)
    board.waits(1, position(1, ["a", "c", "b"], [0, 1]), 0.0)
    lost = board.judge(1.0)
    assert lost is not None and lost.out_of_step
    assert "rank 0 c (its call 3) and waits in psum" in lost.text and "rank 1 b (its call 3)" in lost.text
    assert "differ from call 2 on: " in lost.text


def test_a_dead_rank_ends_the_waits_of_those_that_need_it() -> None:
    board = Board(3)
    board.waits(0, position(0, ["a"], [0, 1]), 0.0)
    board.ends(2, 10.0)
    assert board.judge(100.0) is None
    board.ends(1, 100.0)
    assert board.judge(101.0) is None, "its last message may be on its way"
    assert board.judge(104.0) == Lost("")


def test_a_rank_that_left_later_is_not_waited_for_in_vain() -> None:
    board = Board(2)
    board.leaves(1, 2)
    board.waits(0, position(0, ["a", "b"], [0, 1]), 0.0)
    assert board.judge(1000.0) is None, "it made this call"
    board.waits(0, position(0, ["a", "b", "c"], [0, 1]), 0.0)
    lost = board.judge(1000.0)
    assert lost is not None and "rank <1> has let the processes go after its call 2" in lost.text


# -----------------------------------------------------------------------------
# Ranks that die
# -----------------------------------------------------------------------------


def with_a_rank_that_dies_while_another_waits(rank: int, algorithm: str) -> Outcome:
    """The ranks wait for one that dies after seconds, and their errors name it."""
    step = training(Mesh(data=2, tensor=2), fp.zero(3, "data"), algorithm)
    if rank == 3:
        time.sleep(5)
        os._exit(17)
    found = outcome(step)
    stay_alive(3)
    return found


@pytest.mark.parametrize("algorithm", ["auto", "backend"])
def test_a_rank_that_dies_while_others_wait_is_named(algorithm: str) -> None:
    results = run_on_processes(with_a_rank_that_dies_while_another_waits, 4, algorithm, deaths=True)
    for rank, coordinates in ((1, "data=0, tensor=1"),):
        kind, message, seconds = results[rank]
        assert kind == "CollectiveError" and seconds < 30, message
        assert "test_watch.py" in message and f"rank {rank} ({coordinates}): " in message, message
        assert "rank 3 (data=1, tensor=1) died" in message and " in step 2 (call " in message, message
