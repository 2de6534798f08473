"""The rule that selects the algorithm of a collective, and the reasons that it gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from functional_parallel.collectives import slots
from functional_parallel.runtime import ProcessRuntime
from functional_parallel.runtime.algorithms import (
    ALGORITHMS,
    algorithm_group,
    requested_algorithm,
    select,
)
from functional_parallel.runtime.algorithms.selection import VARIABLE
from functional_parallel.runtime.processes.process_communicator import ProcessCommunicator
from sharding_specs import Mesh
from tests.processes import run_on_processes

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
DTYPES = (torch.float64, torch.float32, torch.int32, torch.bfloat16, torch.uint8)


def test_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert requested_algorithm(None, ordered=False) == "auto"
    monkeypatch.setenv(VARIABLE, "ring")
    assert requested_algorithm(None, ordered=False) == "ring"
    assert requested_algorithm("direct", ordered=True) == "direct", "an argument goes first"
    with pytest.raises(
        ValueError, match=r"adds in rank order, which algorithm='ring' .* does not; write one of 'auto'"
    ):
        requested_algorithm(None, ordered=True)
    with pytest.raises(ValueError, match=r"algorithm='rng' .*write one of 'auto', 'backend', 'shared'"):
        requested_algorithm("rng", ordered=False)


@pytest.mark.parametrize("removed", ["naive", "halving"])
def test_a_name_that_there_is_not_is_told_the_names_that_there_are(removed: str) -> None:
    known = "'auto', 'backend', 'shared', 'two_level', 'direct', .*'ring'"
    with pytest.raises(ValueError, match=rf"^algorithm='{removed}' \(or {VARIABLE}\): write one of {known}$"):
        requested_algorithm(removed, ordered=False)


@pytest.mark.parametrize(
    "hosts, shares, ordered, wanted",  # all_reduce, reduce_scatter, all_gather, all_to_all
    [
        ("aa", True, False, "shared shared shared shared"),
        ("aaaa", True, True, "shared shared shared shared"),
        ("aaa", False, False, "backend backend backend backend"),
        ("aaa", False, True, "direct backend backend backend"),
        ("aabb", True, False, "two_level two_level two_level backend"),
        ("abab", False, False, "two_level two_level two_level backend"),
        ("aabb", True, True, "direct backend two_level backend"),
        ("aab", True, False, "backend backend backend backend"),
        ("aab", True, True, "direct backend backend backend"),
        ("abc", False, False, "backend backend backend backend"),
        ("abc", False, True, "direct backend backend backend"),
    ],
)
def test_the_rule(hosts: str, shares: bool, ordered: bool, wanted: str) -> None:
    """It knows the hosts, and whether their ranks share memory; a reduce-scatter of the backend adds in rank order."""
    found = select(on_hosts(hosts, shares), "auto", ordered)
    assert [found[kind].algorithm and found[kind].algorithm.name for kind in KINDS] == [
        None if name == "backend" else name for name in wanted.split()
    ]


def test_what_is_asked_for_is_selected_where_it_can_be() -> None:
    found = select(on_hosts("aabb", True), "ring", False)
    assert [found[kind].algorithm for kind in KINDS] == [ALGORITHMS["ring"]] * 3 + [None]
    assert found["all_to_all"].because == "ring has no exchange"
    with pytest.raises(ValueError, match=r"algorithm='shared' .*cannot be used here: its ranks share no memory"):
        select(on_hosts("ab", False), "shared", False)
    with pytest.raises(ValueError, match="cannot be used here: all its ranks are on one host"):
        select(on_hosts("aa", True), "two_level", False)


def on_hosts(hosts: str, shares: bool) -> Any:
    by_host = [[rank for rank, name in enumerate(hosts) if name == each] for each in sorted(set(hosts))]
    return SimpleNamespace(hosts=by_host, is_on_one_host=len(by_host) == 1, shared=object() if shares else None)


def choices(rank: int, size: int) -> dict[str, Any]:
    mesh = Mesh(data=size)
    with pytest.raises(ValueError, match="algorithm must be the same on every rank, but it is, by rank, ring, direct"):
        ProcessRuntime(mesh, algorithm="direct" if rank else "ring")
    carrier = ProcessCommunicator(mesh)
    operands = [torch.zeros(length, dtype=dtype) for length in (0, 2, 1 << 20) for dtype in DTYPES]
    with fresh_hosts(str(rank)):
        apart = ProcessRuntime(mesh).algorithms()
    return {
        "table": ProcessRuntime(mesh).algorithms(),
        "forced": ProcessRuntime(mesh, algorithm="ring").algorithms("data"),
        "off": ProcessRuntime(mesh, algorithm="backend").algorithms("data"),
        "apart": apart,
        "by operand": {carrier._chosen(kind, x, ("data",))[0].name for kind in KINDS for x in operands},  # type: ignore[index]
        "elsewhere": carrier._chosen("all_reduce", torch.zeros(2, device="meta"), ("data",)),
    }


@contextmanager
def fresh_hosts(host: str) -> Iterator[None]:
    """Groups that are made inside believe that this rank is on the host of this name."""
    with patch.object(algorithm_group, "host_identity", lambda: host):
        yield


def test_all_ranks_choose_alike_and_say_why() -> None:
    first, *others = run_on_processes(choices, 2, 2)
    assert all(other == first for other in others)
    assert first["table"].splitlines() == [
        "2 ranks on 1 host",
        "all_reduce      shared     its ranks share memory",
        "reduce_scatter  shared     its ranks share memory",
        "all_gather      shared     its ranks share memory",
        "all_to_all      shared     its ranks share memory",
    ]
    assert first["forced"].count("ring       asked for") == 3
    assert first["forced"].endswith("all_to_all      backend    ring has no exchange")
    assert first["off"] == "collectives over ('data',) go the way of the backend, gloo"
    assert first["apart"].startswith("2 ranks on 2 hosts\n") and first["apart"].count("no other applies") == 4
    assert first["by operand"] == {"shared"}, "of any kind, size and dtype"
    assert first["elsewhere"] is None, "the backend carries what is not in main memory"


def fast_sums(rank: int, hosts: str) -> list[Tensor]:
    """Sums whose bits depend on the order of addition, of sizes that are sent at once and in pieces."""
    slots.AT_ONCE, slots.PIECE = 1 << 16, 1 << 12
    generator, found = torch.Generator().manual_seed(rank), []
    with fresh_hosts(hosts[rank]):
        carrier = ProcessCommunicator(Mesh(data=len(hosts)), reduction="fast")
        assert "backend" not in carrier.algorithms(("data",)).split("all_gather")[0], "sums are the library's own"
        for length in (4, 4096, 1 << 18):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                x = torch.randn(length, generator=generator).to(dtype)
                found += [carrier.psum(x, ("data",)), carrier.psum_scatter(x, ("data",), 0)]
    return found


@pytest.mark.parametrize("hosts", ["aaaa", "aabb"])
def test_fast_sums_have_the_same_bits_in_every_run(hosts: str) -> None:
    first, second = (run_on_processes(fast_sums, 4, hosts) for _ in range(2))
    for once, again in zip(first, second, strict=True):
        assert all(map(torch.equal, once, again))
