"""Ranks on several hosts: processes of this one that do not know it, and so neither share memory nor signal."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import optree
import pytest
import torch

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, SimulatedRuntime, use_runtime
from functional_parallel.runtime.calls import CallLog, GroupWaits
from functional_parallel.shared_memory import host_group
from functional_parallel.shared_memory import rendezvous as connect
from sharding_specs import Mesh
from tests.processes import outcome, run_on_processes
from tests.shared_memory.groups import group_of_all

X = torch.arange(96, dtype=torch.float64).reshape(12, 8) % 5


def on_hosts(hosts: str) -> None:
    """Let this process believe that it is on the host that the letter of its rank names."""
    host_group.host_identity = lambda: hosts[int(os.environ["RANK"])]


def training(mesh: Mesh, plan: Any, shift: float = 0.0) -> Any:
    return fp.train_step(lambda p, x: ((x @ p["w"] - shift) ** 2).mean(), fp.optim.sgd(0.1, momentum=0.5), mesh, plan)


def begun(mesh: Mesh, plan: Any, algorithm: str, timeout: float) -> tuple[Any, Any]:
    """A training step that was taken once, and the state after it."""
    use_runtime(ProcessRuntime(mesh, timeout=timeout, algorithm=algorithm))
    train = training(mesh, plan)
    return train, train(train.init(parameters()), X)[0]


def parameters() -> dict[str, torch.Tensor]:
    return {"w": torch.eye(8, dtype=torch.float64)}


# -----------------------------------------------------------------------------
# Ranks that do different things
# -----------------------------------------------------------------------------


def two_models_in_another_order(rank: int, algorithm: str, hosts: str) -> tuple[str, str, float]:
    """Their collectives are of the same kinds and sizes."""
    on_hosts(hosts)
    mesh = Mesh(data=2)
    use_runtime(ProcessRuntime(mesh, timeout=60, algorithm=algorithm))
    both = [training(mesh, fp.zero(3, "data"), shift) for shift in (0.0, 1.0)]
    states = [train(train.init(parameters()), X)[0] for train in both]
    return outcome(lambda: both[rank](states[rank], X))


@pytest.mark.parametrize("algorithm", ["auto", "backend"])
def test_ranks_on_two_hosts_that_train_different_models(algorithm: str) -> None:
    """One's gradients went into the other's sums, without a word."""
    for kind, message, seconds in run_on_processes(two_models_in_another_order, 2, algorithm, "ab"):
        assert kind == "CallMismatchError" and seconds < 20, message
        for each in range(2):
            assert f"rank {each} (data={each}) runs train_step" in message, message
        assert "test_hosts.py" in message, "the line"


def reading_while_others_train(rank: int, algorithm: str) -> tuple[str, str, float]:
    """Their first messages have different sizes, which gloo takes for an attack and ends the process."""
    on_hosts("ab")
    train, state = begun(Mesh(data=2), fp.zero(1, "data"), algorithm, 60)
    train.whole(state)
    return outcome(lambda: train(state, X) if rank else train.whole(state))


@pytest.mark.parametrize("algorithm", ["auto", "backend"])
def test_a_rank_on_another_host_that_reads_parameters(algorithm: str) -> None:
    reading, training = run_on_processes(reading_while_others_train, 2, algorithm)
    assert reading[0] == training[0] == "CallMismatchError"
    for _, message, _ in (reading, training):
        assert "rank 0 (data=0) reads a value that lies in parts" in message
        assert "rank 1 (data=1) runs train_step" in message


def messages_of_different_calls(rank: int) -> list[float]:
    """Each sends in a call of its own what the other expects in another one, and both then go on in step."""
    doing = CallLog()
    pair = group_of_all(rank, 2, GroupWaits(doing=doing), host=str(rank))
    received = []
    for calls in (["first", "second"], ["second", "first"]):
        arriving = []
        for call in calls if rank else calls[::-1]:
            doing.mark = 1 << 32 | sum(call.encode()) << 12  # the first thing that each does
            into, value = torch.zeros(1, dtype=torch.float64), torch.full((1,), float(len(call)), dtype=torch.float64)
            arriving.append((into, [pair.receive(into, 1 - rank), pair.send(value, 1 - rank)]))
        for into, works in arriving:
            for work in works:
                work.wait()
            received.append(into.item())
    return received


def test_messages_of_another_call_are_not_taken() -> None:
    assert run_on_processes(messages_of_different_calls, 2) == [[6.0, 5.0, 5.0, 6.0], [5.0, 6.0, 6.0, 5.0]]


def test_a_short_mark_tells_calls_apart() -> None:
    doing, seen = CallLog(), set()
    for step in range(200):
        doing.begin("runs train_step" if step % 2 else "reads")
        seen.add(doing.brief(19))
    assert len(seen) == 200 and max(seen) < 1 << 19


# -----------------------------------------------------------------------------
# Ranks that only seem to be on one host, as on copies of a virtual machine
# -----------------------------------------------------------------------------


def calling_where_nobody_is(rank: int) -> tuple[bool, float, list[float]]:
    listen = connect._listen
    connect._listen = lambda stack: (listen(stack)[0], "\0functional_parallel-nobody")
    runtime = ProcessRuntime(Mesh(data=3), timeout=60)
    began = time.monotonic()
    pair = runtime.communicator._host_group(("data",))
    seconds = time.monotonic() - began
    return pair.memory is None, seconds, runtime.communicator.psum(torch.ones(2), ("data",)).tolist()


@pytest.mark.skipif(sys.platform != "linux", reason="names of sockets outside the file system")
def test_ranks_that_cannot_reach_each_other_do_without_shared_memory_at_once() -> None:
    """Those that were to be called waited for it for 20 seconds, in every group."""
    for without, seconds, total in run_on_processes(calling_where_nobody_is, 3):
        assert without and seconds < 10 and total == [3.0, 3.0]


def test_processes_that_do_not_find_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a host's name leads to itself alone: an interface that is not there."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere")
    with pytest.raises(
        fp.CollectiveError, match=r"rank 0 on .*: the processes did not find each other, with RANK=0, "
    ) as caught:
        ProcessRuntime(Mesh(data=1))
    assert "MASTER_ADDR=127.0.0.1" in str(caught.value) and "set GLOO_SOCKET_IFNAME on each" in str(caught.value)


# -----------------------------------------------------------------------------
# Ranks that die
# -----------------------------------------------------------------------------


def with_a_rank_that_dies_on_the_second_host(rank: int) -> tuple[str, str, float]:
    on_hosts("aabb")
    mesh = Mesh(data=4)
    runtime = ProcessRuntime(mesh, timeout=20, algorithm="auto")
    total = lambda: runtime.communicator.psum(torch.ones(8), ("data",))  # noqa: E731
    total()
    if rank == 3:
        os._exit(17)
    return outcome(total)


def test_a_rank_that_dies_on_another_host_is_named_by_its_global_rank() -> None:
    """On its host it is the second; the error called it by that."""
    results = run_on_processes(with_a_rank_that_dies_on_the_second_host, 4, deaths=True)
    kind, message, seconds = results[2]
    assert kind == "CollectiveError" and seconds < 15
    assert "rank 3 (data=3) died. torch says: " in message


def with_a_rank_that_dies_between_hosts(rank: int) -> list[tuple[str, str, float]]:
    """In the one mesh before its first collective, in the other after it."""
    on_hosts("abc")
    before, after = (ProcessRuntime(Mesh(data=3), timeout=20) for _ in range(2))
    after.communicator.psum(torch.ones(8), ("data",))
    if rank == 1:
        os._exit(17)
    both = [lambda each=each: each.communicator.psum(torch.ones(8), ("data",)) for each in (after, before)]
    return [outcome(run) for run in both]


def with_a_rank_that_dies_before_a_step(rank: int, algorithm: str) -> tuple[str, str, float]:
    on_hosts("abcd")
    train, state = begun(Mesh(data=4), fp.zero(3, "data"), algorithm, 20)
    if rank == 3:
        time.sleep(1.0)  # the others wait for it
        os._exit(17)
    found = outcome(lambda: train(state, X))
    time.sleep(2.0)  # else one that knows less would find this one ended
    return found


@pytest.mark.parametrize("algorithm", ["auto", "backend"])
def test_a_rank_that_dies_before_a_step_is_named_on_all_hosts(algorithm: str) -> None:
    results = run_on_processes(with_a_rank_that_dies_before_a_step, 4, algorithm, deaths=True)
    for rank, (kind, message, _) in enumerate(results[:3]):
        assert kind == "CollectiveError" and f"rank {rank} (data={rank}): " in message
        assert "rank 3 (data=3) died. torch says: " in message, message


def test_a_rank_that_dies_on_another_host_is_named_by_who_waits_for_it() -> None:
    results = run_on_processes(with_a_rank_that_dies_between_hosts, 3, deaths=True)
    kind, message, seconds = results[2][0]
    assert kind == "CollectiveError" and seconds < 15
    assert "rank 2 (data=2): psum over ('data',) of float32[8] failed" in message
    assert "rank 1 (data=1) died. torch says: " in message
    for rank in (0, 2):
        kind, message, _ = results[rank][1]
        assert kind == "CollectiveError"
        assert f"rank {rank} (data={rank}): the first collective over ('data',), in which its ranks find" in message
        assert "rank 1 (data=1) died. torch says: " in message


# -----------------------------------------------------------------------------
# Ranks in step
# -----------------------------------------------------------------------------


def trained(mesh: Mesh, plan: Any) -> list[torch.Tensor]:
    train = training(mesh, plan)
    state = train.init(parameters())
    for _ in range(3):
        state, _ = train(state, X)
    return optree.tree_leaves(train.whole(state))


def on_two_and_one(rank: int) -> list[list[torch.Tensor]]:
    on_hosts("aab")
    data, pipe = Mesh(data=3), Mesh(pipe=3)
    use_runtime(ProcessRuntime(data, timeout=60, reduction="ordered"))
    use_runtime(ProcessRuntime(pipe, timeout=60, reduction="ordered"))
    return in_step(data, pipe)


def in_step(data: Mesh, pipe: Mesh) -> list[list[torch.Tensor]]:
    return [trained(data, fp.zero(3, "data")), four_layers(pipe)]


def four_layers(mesh: Mesh) -> list[torch.Tensor]:
    """A pipeline, some of whose messages go through shared memory and some between hosts."""

    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        for w in params["layers"]:
            x = torch.tanh(x @ w)
        return (x**2).mean()

    plan = fp.pipeline("pipe", schedule="1f1b", microbatches=4)
    train = fp.train_step(loss, fp.optim.adamw(0.1), mesh, plan)
    state = train.init({"layers": [torch.eye(8, dtype=torch.float64) * (1 + layer) for layer in range(6)]})
    for _ in range(3):
        state, _ = train(state, X)
    return optree.tree_leaves(train.whole(state))


def test_training_on_two_hosts_with_two_ranks_and_one() -> None:
    data, pipe = Mesh(data=3), Mesh(pipe=3)
    for mesh in (data, pipe):
        use_runtime(SimulatedRuntime(mesh))
    wanted = in_step(data, pipe)
    for found in run_on_processes(on_two_and_one, 3):
        for some, others in zip(found, wanted, strict=True):
            assert all(map(torch.equal, some, others))
