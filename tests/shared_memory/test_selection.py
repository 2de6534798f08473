"""Transport of collectives between processes: the requested one, and that of a group by its hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from functional_parallel.collectives import CollectiveCall
from functional_parallel.runtime import ALGORITHM_VARIABLE, ProcessRuntime, communicator
from functional_parallel.runtime.processes.process_communicator import ProcessCommunicator
from functional_parallel.runtime.processes.transports import requested_transport
from functional_parallel.shared_memory import SharedMemoryCommunicator, host_group, slots
from sharding_specs import Mesh
from tests.processes import run_on_processes


def test_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALGORITHM_VARIABLE, raising=False)
    name, transport = requested_transport(None)
    assert name == "auto" and transport.communicator is SharedMemoryCommunicator
    monkeypatch.setenv(ALGORITHM_VARIABLE, "backend")
    assert requested_transport(None)[1].communicator is ProcessCommunicator
    assert requested_transport("shared")[0] == "shared", "an argument goes first"


def test_a_name_that_there_is_not_is_told_the_names_that_there_are() -> None:
    known = "'auto', 'backend', 'shared'"
    with pytest.raises(ValueError, match=rf"^algorithm='halving' \(or {ALGORITHM_VARIABLE}\): write one of {known}$"):
        requested_transport("halving")


@pytest.mark.parametrize("removed", ["ring", "two_level", "direct"])
def test_a_removed_name_warns(removed: str) -> None:
    with pytest.warns(FutureWarning, match=f"^algorithm='{removed}' .* was removed, so 'auto' is used"):
        assert requested_transport(removed)[0] == "auto"


def choices(rank: int, hosts: str) -> dict[str, Any]:
    mesh = Mesh(data=len(hosts))
    with pytest.raises(ValueError, match="algorithm must be the same on every rank, but it is, by rank, backend, auto"):
        ProcessRuntime(mesh, algorithm="auto" if rank else "backend")
    with fresh_hosts(hosts[rank]):
        auto, shared = ProcessRuntime(mesh, algorithm="auto"), ProcessRuntime(mesh, algorithm="shared")
        found = {"auto": auto.algorithms(), "sum": auto.communicator.psum(torch.ones(2), ("data",)).tolist()}
        try:
            found["shared"] = shared.algorithms("data")
        except ValueError as error:
            found["shared"] = str(error)
    found["off"] = ProcessRuntime(mesh, algorithm="backend").algorithms("data")
    dist.barrier()  # a rank that ends now would close connections that others still make
    return found


@contextmanager
def fresh_hosts(host: str) -> Iterator[None]:
    """Groups that are made inside believe that this rank is on the host of this name."""
    with patch.object(host_group, "host_identity", lambda: host):
        yield


@pytest.mark.parametrize("hosts", ["aa", "ab", "aab"])
def test_all_ranks_choose_alike_and_say_why(hosts: str) -> None:
    first, *others = run_on_processes(choices, len(hosts), hosts)
    assert all(other == first for other in others)
    backend = "collectives over ('data',) go the way of the backend, gloo"
    assert first["off"] == backend
    assert first["sum"] == [len(hosts)] * 2
    if hosts == "aa":
        assert first["auto"] == "2 ranks on 1 host: sums, gathers and exchanges over ('data',) go through shared memory"
        assert first["shared"] == first["auto"]
    else:
        ranks = f"{len(hosts)} ranks on 2 hosts: "
        assert first["auto"] == f"{ranks}{backend}, because these ranks do not all share memory"
        assert "algorithm='shared' " in first["shared"] and "do not all share memory; write 'auto'" in first["shared"]


def fast_sums(rank: int, size: int) -> list[Tensor]:
    """Sums whose bits depend on the order of addition, of sizes that are sent at once and in pieces."""
    slots.AT_ONCE, slots.PIECE = 1 << 16, 1 << 12
    generator, found = torch.Generator().manual_seed(rank), []
    carrier = communicator(Mesh(data=size), reduction="fast")
    for length in (4, 4096, 1 << 18):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            x = torch.randn(length, generator=generator).to(dtype)
            found += [carrier.psum(x, ("data",)), carrier.psum_scatter(x, ("data",), 0)]
    return found


def test_fast_sums_have_the_same_bits_in_every_run() -> None:
    first, second = (run_on_processes(fast_sums, 4, 4) for _ in range(2))
    for once, again in zip(first, second, strict=True):
        assert all(map(torch.equal, once, again))


def in_main_memory_alone(rank: int) -> bool:
    """The backend carries what is not in main memory."""
    carrier = communicator(Mesh(data=2), algorithm="shared")
    with patch.object(ProcessCommunicator, "start", lambda *args, **options: "by the backend"):
        return carrier.start(CollectiveCall("psum", None, ("data",)), torch.ones(2, device="meta")) == "by the backend"


def test_what_is_elsewhere_goes_by_the_backend() -> None:
    assert run_on_processes(in_main_memory_alone, 2) == [True, True]
