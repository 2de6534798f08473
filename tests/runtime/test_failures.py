"""Ranks that disagree, and ranks that die: an error on every rank that is left, in seconds, naming who and where."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_parallel as fp
from functional_parallel.errors import InputMismatchError, ProgramMismatchError
from functional_parallel.optim import SGDState
from functional_parallel.runtime import ProcessRuntime, SimulatedRuntime, use_runtime
from functional_parallel.runtime.calls.waits import rank_name, rank_names
from sharding_specs import Mesh, P
from tests.processes import run_on_processes

MESH = Mesh(data=2, tensor=2)
X = torch.arange(16, dtype=torch.float64).reshape(4, 4)
DYING = 3
TIMEOUT = 4.0


# -----------------------------------------------------------------------------
# What the ranks run
# -----------------------------------------------------------------------------


def on_disagreeing_ranks(rank: int) -> dict[str, Any]:
    use_runtime(ProcessRuntime(MESH, timeout=20))
    plan = fp.data_parallel("data")
    train, own = (
        fp.train_step(lambda p, x: (x @ p["w"]).sum(), fp.optim.sgd(0.1), MESH, plan, batch=batch)
        for batch in ("global", "own")
    )
    momentum = fp.train_step(lambda p, x: (x @ p["w"]).sum(), fp.optim.sgd(0.1, momentum=0.9), MESH, plan)
    return {
        "programs": error_and_time(lambda: product_of(rank == 2)(X)),
        "constants": error_and_time(lambda: learning(0.1 if rank else 0.25)(X)),
        "shapes": error_and_time(lambda: product_of(False)(X if rank else X[:, :2])),
        "inputs": error_and_time(lambda: loss_step()({"layers": [X, X + (rank == 1)]}, X)),
        "parameters": error_and_time(lambda: train.init({"w": X + (rank == 1)})),
        "loaded": error_and_time(lambda: momentum.load({"w": X}, SGDState(torch.ones(()), {"w": X + (rank == 2)}), 1)),
        "steps": error_and_time(lambda: momentum.load({"w": X}, SGDState(torch.ones(()), {"w": X}), 1 + (rank == 2))),
        "batch": error_and_time(lambda: train(train.init({"w": X}), X + (rank == 3))),
        "parts": error_and_time(lambda: own(own.init({"w": X}), X + rank)),
        "shared parts": error_and_time(lambda: own(own.init({"w": X}), X + rank // 2)),
        "agreeing": product_of(False)(X),
    }


def product_of(other: bool) -> Any:
    """Ranks that disagree trace another line here."""

    @fp.shard_map(MESH, in_specs=P("data", "tensor"), out_specs=P("data"))
    def product(x: Tensor) -> Tensor:
        y = x * 2
        if other:
            y = y.sin()
        return fp.psum(y, "tensor")

    return product


def learning(rate: float) -> Any:
    return fp.shard_map(MESH, in_specs=P("data"), out_specs=P("data"))(lambda x: x * torch.tensor(rate))


def loss_step() -> Any:
    plan = fp.data_parallel("data")
    return fp.compile(plan(lambda params, x: sum((x @ w).sum() for w in params["layers"])), MESH)


def error_and_time(run: Any) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        run()
    except (ProgramMismatchError, InputMismatchError, fp.CollectiveError) as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


def on_a_mesh_that_loses_a_rank(rank: int) -> tuple[str, str, float]:
    """One good step, and then a rank dies where a step's program is under way: between two of its collectives."""
    use_runtime(ProcessRuntime(MESH, timeout=TIMEOUT))
    step = two_sums(rank)
    step(X)
    dying.append(True)
    return error_and_time(lambda: step(X))


dying: list[bool] = []


@torch.library.custom_op("tests_runtime::perhaps_die", mutates_args=())
def perhaps_die(x: Tensor) -> Tensor:
    if dying and int(os.environ["RANK"]) == DYING:
        os._exit(17)
    return x.clone()


@perhaps_die.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def two_sums(rank: int) -> Any:
    @fp.shard_map(MESH, in_specs=P("data", "tensor"), out_specs=P())
    def total(x: Tensor) -> Tensor:
        x = fp.psum(x, "tensor")
        x = perhaps_die(x)
        return fp.psum(x, "data")  # the sum that rank 3 never comes to

    return total


def on_a_mesh_whose_rank_never_compares(rank: int) -> tuple[str, str, float]:
    use_runtime(ProcessRuntime(MESH, timeout=TIMEOUT))
    if rank == DYING:
        os._exit(17)
    return error_and_time(lambda: product_of(False)(X))


# -----------------------------------------------------------------------------
# What must hold
# -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def disagreeing() -> list[dict[str, Any]]:
    return run_on_processes(on_disagreeing_ranks, 4, timeout=150)


def test_different_programs_are_refused_on_every_rank(disagreeing: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(disagreeing):
        kind, message, seconds = result["programs"]
        assert kind == "ProgramMismatchError" and seconds < 30
        same, other = ([2], 0) if rank == 2 else ([0, 1, 3], 2)
        names = f"{rank_names(MESH, same)} {'has' if rank == 2 else 'have'} this one (product)"
        assert f"{rank_name(MESH, rank)}: the ranks are about to run different programs. {names}" in message
        assert f"it first differs from that of {rank_name(MESH, other)} in" in message
        assert "sin(" in message and "psum(" in message, "the first line that differs, from both programs"
        assert "look for code that depends on the rank" in message


def test_constants_that_differ_are_shown(disagreeing: list[dict[str, Any]]) -> None:
    for result in disagreeing:
        kind, message, _ = result["constants"]
        assert kind == "ProgramMismatchError"
        assert "constant 0.25" in message and "constant 0.1" in message


def test_different_shapes_are_different_programs(disagreeing: list[dict[str, Any]]) -> None:
    for result in disagreeing:
        kind, message, _ = result["shapes"]
        assert kind == "ProgramMismatchError" and "[2, 1]" in message and "[2, 2]" in message


def test_different_inputs_are_refused_by_path(disagreeing: list[dict[str, Any]]) -> None:
    for result in disagreeing:
        kind, message, seconds = result["inputs"]
        assert kind == "InputMismatchError" and seconds < 30
        assert "ranks passed different 0/layers/1." in message
        assert "call torch.manual_seed(0) before the first draw, on every rank. For shards" in message
        assert "use train_step(batch='own')" in message


def test_parameters_and_batches_of_training_are_compared(disagreeing: list[dict[str, Any]]) -> None:
    for result in disagreeing:
        kind, message, _ = result["parameters"]
        assert (
            kind == "InputMismatchError"
            and "train_step.init takes whole tensors" in message
            and "different w" in message
        )
        kind, message, _ = result["batch"]
        assert kind == "InputMismatchError" and "train_step takes whole tensors" in message and "different 0" in message
        assert "call torch.manual_seed(0) before the first draw, on every rank. For shards" in message
        assert "use train_step(batch='own')" in message


def test_loaded_states_are_compared(disagreeing: list[dict[str, Any]]) -> None:
    """Ranks that read files of their own went on with moments of their own, and their parameters drifted apart."""
    for result in disagreeing:
        for case, told in (("loaded", "optimizer_state/1/w"), ("steps", "step")):
            kind, message, _ = result[case]
            assert kind == "InputMismatchError"
            assert "train_step.load takes whole tensors, the same on every rank" in message
            assert f"but ranks passed different {told}. " in message
            assert "of a checkpoint every rank loads the whole file" in message


def test_ranks_that_share_a_part_of_the_batch_are_given_the_same(disagreeing: list[dict[str, Any]]) -> None:
    """A loader that splits samples among all processes, where tensor ranks are not told apart by the batch."""
    for result in disagreeing:
        kind, message, _ = result["parts"]
        assert kind == "InputMismatchError"
        assert "ranks share that differ along 'tensor' alone, but such ranks passed different 0." in message
        assert "fp.Sampler(length, batch, mesh)" in message
        assert result["shared parts"][0] == "nothing"


def test_ranks_go_on_after_a_refusal(disagreeing: list[dict[str, Any]]) -> None:
    use_runtime(SimulatedRuntime(MESH))
    for result in disagreeing:
        assert torch.equal(result["agreeing"], product_of(False)(X))


def test_a_rank_that_dies_mid_step() -> None:
    """Its partner along data is told at once or at the timeout; ranks that need nothing of it finish."""
    start = time.monotonic()
    results = run_on_processes(on_a_mesh_that_loses_a_rank, 4, timeout=150, deaths=True)
    assert time.monotonic() - start < 90, "starting four processes included"
    assert results[DYING] == 17
    kind, message, seconds = results[1]  # (data=0, tensor=1), whose partner along data is rank 3
    assert kind == "CollectiveError" and seconds < 25
    assert "rank 1 (data=0, tensor=1): psum over ('data',) of float64[2, 2] failed after" in message
    assert "rank 3 (data=1, tensor=1) died. torch says: " in message
    assert "timeout" not in message, "a process that died is not reported as a timeout"
    with open(__file__) as file:
        line = next(number for number, text in enumerate(file, 1) if "the sum that rank 3 never comes to" in text)
    assert f'test_failures.py:{line}: `return fp.psum(x, "data")' in message


def test_a_rank_that_dies_before_the_first_step() -> None:
    results = run_on_processes(on_a_mesh_whose_rank_never_compares, 4, timeout=150, deaths=True)
    for rank, (kind, message, seconds) in enumerate(results[:DYING]):
        assert kind == "CollectiveError" and seconds < 20
        assert f"{rank_name(MESH, rank)}: an exchange with all ranks to compare programs failed after" in message
        assert "rank 3 (data=1, tensor=1) died. torch says: " in message and "timeout" not in message


def test_the_work_of_these_tests_is_right_on_simulated_ranks() -> None:
    assert torch.equal(two_sums(0)(X), X[:2, :2] + X[:2, 2:] + X[2:, :2] + X[2:, 2:])
