"""Ranks that make different calls: told at once who does what, before one takes the other's bytes for its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, use_runtime
from functional_parallel.runtime.calls.waits import rank_name
from sharding_specs import Mesh, P
from tests.processes import outcome, run_on_processes

X = torch.arange(16, dtype=torch.float64).reshape(4, 4) % 5


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return ((torch.tanh(x @ params["a"]) @ params["b"] - 1) ** 2).mean()


class Training:
    """Two steps in step, on a runtime of its own: everything that ranks do below has run before."""

    def __init__(self, mesh: Mesh, plan: Any, algorithm: str = "shared") -> None:
        use_runtime(ProcessRuntime(mesh, timeout=60, algorithm=algorithm))
        self.train = fp.train_step(loss, fp.optim.sgd(0.1, momentum=0.5), mesh, plan)
        self.evaluate = fp.compile(plan(loss), mesh)
        params = {"a": torch.eye(4, dtype=torch.float64), "b": torch.ones(4, 2, dtype=torch.float64)}
        self.state = self.train.init(params)
        self.evaluate(params, X)
        self.step()
        self.params = self.train.params(self.state)
        self.step()

    def step(self, x: torch.Tensor = X) -> None:
        self.state, _ = self.train(self.state, x)


def on_sharded_parameters(rank: int) -> dict[str, Any]:
    found = {}
    for stage in (1, 3):
        run = Training(Mesh(data=2), fp.zero(stage, "data"))
        reads = outcome(lambda run=run: run.step() if rank else run.train.whole(run.state))
        found[f"zero {stage}"] = reads
    return found


def on_a_call_that_compares_inputs(rank: int, pipelined: bool) -> tuple[str, str, float]:
    mesh = Mesh(pipe=2) if pipelined else Mesh(data=2)
    run = Training(mesh, fp.pipeline("pipe", microbatches=2) if pipelined else fp.zero(3, "data"))
    return outcome(lambda: run.step() if rank else run.evaluate(run.params, X))


PLANS: dict[str, tuple[Mesh, Any]] = {
    "data": (Mesh(data=2), fp.data_parallel("data")),
    "zero 1": (Mesh(data=2), fp.zero(1, "data")),
    "zero 3": (Mesh(data=2), fp.zero(3, "data")),
    "tensor": (Mesh(tensor=2), fp.tensor_parallel("tensor", {"a": P(None, "tensor"), "b": P("tensor")})),
    "pipeline": (Mesh(pipe=2), fp.pipeline("pipe", microbatches=2)),
}


def on_another_batch_of_one_shape(rank: int, algorithm: str) -> dict[str, list[tuple[str, str, float]]]:
    """The third step of each is on one batch again, the fourth is not; X[0, 0] is one of the values looked at.

    Messages of a pipeline by the backend tell calls apart, but not batches.
    """
    found = {}
    for name, (mesh, plan) in PLANS.items():
        if (name, algorithm) == ("pipeline", "backend"):
            continue
        run = Training(mesh, plan, algorithm)
        batches = [X + 1, X + torch.eye(4, dtype=X.dtype) * rank]
        found[name] = [outcome(lambda run=run, batch=batch: run.step(batch)) for batch in batches]
    return found


@pytest.mark.parametrize("algorithm", ["shared", "backend"])
def test_another_batch_of_one_shape_on_one_rank(algorithm: str) -> None:
    for rank, found in enumerate(run_on_processes(on_another_batch_of_one_shape, 2, algorithm)):
        for name, (same, other) in found.items():
            assert same[0] == "nothing", same
            assert other[0] == "CallMismatchError" and other[2] < 10, (name, other)
            mesh = PLANS[name][0]
            mine, its = rank_name(mesh, rank), rank_name(mesh, 1 - rank)
            assert other[1].count(f"the ranks were given different batches: {mine} runs train_step") == 1, other
            assert f"and {its} does with other values. Every" in other[1], other


def on_a_pipeline(rank: int) -> tuple[str, str, float]:
    run = Training(Mesh(pipe=2), fp.pipeline("pipe", microbatches=2))
    return outcome(lambda: run.step() if rank else run.train.params(run.state))


def test_a_state_that_one_rank_reads_while_the_other_takes_a_step() -> None:
    for rank, result in enumerate(run_on_processes(on_sharded_parameters, 2)):
        for stage in (1, 3):
            kind, message, seconds = result[f"zero {stage}"]
            assert kind == "CallMismatchError" and seconds < 10, message
            assert _says(message, "reads a value that lies in parts", "runs train_step", rank), message
            assert "look for one under `if rank == 0`" in message


def _says(message: str, first: str, second: str, rank: int) -> bool:
    """Whether rank 0 is said to do the first thing, rank 1 the second."""
    mine, other = (second, first) if rank else (first, second)
    return f"rank {rank} (data={rank}) {mine}" in message and f"rank {1 - rank} (data={1 - rank}) {other}" in message


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_compiled_function_that_one_rank_calls(pipelined: bool) -> None:
    """It waits in the backend for the others to compare inputs, where no signal comes from."""
    waiting, told = run_on_processes(on_a_call_that_compares_inputs, 2, pipelined)
    axis = "pipe" if pipelined else "data"
    _check_told(told, f"rank 1 ({axis}=1) runs train_step", f"rank 0 ({axis}=0) meets the others")
    assert waiting[0] in ("CollectiveError", "CallMismatchError") and f"rank 1 ({axis}=1)" in waiting[1], waiting


def on_a_new_function(rank: int) -> tuple[str, str, float]:
    run = Training(Mesh(data=2), fp.zero(3, "data"))
    new = fp.compile(fp.zero(3, "data")(loss), Mesh(data=2))
    return outcome(lambda: (new if rank else run.evaluate)(run.params, X))


def test_a_function_that_one_rank_calls_first() -> None:
    """Both ranks meet all others, one to compare inputs and the other to compare programs."""
    for rank, found in enumerate(run_on_processes(on_a_new_function, 2)):
        _check_told(
            found,
            f"rank {rank} (data={rank}): the ranks are about to do different things: ",
            "rank 0 (data=0) meets the others to compare inputs; rank 1 (data=1) meets the others to compare programs.",
        )


def test_parameters_of_a_pipeline_that_one_rank_reads() -> None:
    waiting, told = run_on_processes(on_a_pipeline, 2)
    _check_told(told, "rank 1 (pipe=1) runs train_step", "rank 0 (pipe=0) reads a value")
    assert waiting[0] == "CollectiveError" and waiting[2] < 20


def _check_told(result: tuple[str, str, float], *texts: str) -> None:
    kind, message, seconds = result
    assert kind == "CallMismatchError" and seconds < 10, message
    assert all(text in message for text in texts), message


def on_two_models_in_another_order(rank: int) -> list[tuple[str, str, float]]:
    mesh = Mesh(data=2)
    use_runtime(ProcessRuntime(mesh, timeout=60))
    train = fp.train_step(loss, fp.optim.sgd(0.1), mesh, fp.zero(3, "data"))
    params = {"a": torch.eye(4, dtype=torch.float64), "b": torch.ones(4, 2, dtype=torch.float64)}
    states = {name: train.init({"a": params["a"] * scale, "b": params["b"]}) for name, scale in (("x", 1), ("y", 2))}
    for name in states:
        states[name], _ = train(states[name], X)
        train.params(states[name])
    order = ["x", "y"][:: 1 - 2 * rank]
    return [outcome(lambda: train.params(states[order[0]])), outcome(lambda: train(states[order[0]], X))]


def test_two_models_that_ranks_go_through_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those in a set: their programs are the same, and each rank took the other model's parts for its own."""
    monkeypatch.setenv("FUNCTIONAL_PARALLEL_ALGORITHM", "shared")  # messages have another name for a rank
    for rank, found in enumerate(run_on_processes(on_two_models_in_another_order, 2)):
        for (kind, message, _), does in zip(
            found, ("reads a value that lies in parts", "runs train_step"), strict=True
        ):
            assert kind == "CallMismatchError" and does in message
            mine, other = (
                message.index(f"of the state that call {call} made") for call in (2 + 2 * rank, 4 - 2 * rank)
            )
            assert mine < message.index(f"rank {1 - rank} (data={1 - rank}) ") < other
