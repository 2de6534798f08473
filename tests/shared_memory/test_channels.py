"""Messages to single ranks arrive whole and in order, however little room there is and however they are taken."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st

from functional_parallel.errors import CallMismatchError
from functional_parallel.runtime import COMPLETED
from functional_parallel.runtime.calls import CallLog, GroupWaits
from functional_parallel.shared_memory import channels, host_group
from functional_parallel.shared_memory.channels import Channels
from functional_parallel.shared_memory.host_group import HostGroup
from tests.processes import run_on_processes

from .groups import group_of_all
from .test_collectives import led_by_rank_0

ROOM = 1 << 12


class Paper:
    """Signals that are written down, not sent."""

    def __init__(self) -> None:
        self.doing = CallLog()
        self.told: list[tuple[int, int]] = []

    def refuse(self, rank: int, mark: int) -> None:
        self.doing.refuse(mark, f"rank {rank}")

    def tell(self, rank: int, note: int) -> None:
        self.told.append((rank, note))

    def wait_until(self, missing: Any) -> None:
        assert not missing(), "it would wait"


def test_room_that_was_read_is_used_again_lowest_first() -> None:
    memory, sent, received = torch.zeros(channels.ROOM, dtype=torch.uint8), Paper(), Paper()
    here, there = Channels(sent, {1: memory}, {1: memory}), Channels(received, {0: memory}, {0: memory})
    for value in range(1, 100):
        message, into = torch.full((100,), value, dtype=torch.uint8), torch.empty(100, dtype=torch.uint8)
        here.send(message, 1)
        there.told(0, sent.told.pop()[1], sent.doing.mark)
        there.receive(into, 0).wait()
        assert torch.equal(into, message)
        here.told(1, received.told.pop()[1], received.doing.mark)
    assert not memory[128:].any(), "one message at a time takes the room of one"


def test_a_message_of_a_rank_that_does_something_else_is_not_taken() -> None:
    memory, sent, received = torch.zeros(channels.ROOM, dtype=torch.uint8), Paper(), Paper()
    here, there = Channels(sent, {1: memory}, {1: memory}), Channels(received, {0: memory}, {0: memory})
    sent.doing.begin("reads")
    received.doing.begin("steps")
    into = torch.zeros(100, dtype=torch.uint8)
    here.send(torch.ones(100, dtype=torch.uint8), 1)
    there.told(0, sent.told.pop()[1], sent.doing.mark)
    with pytest.raises(CallMismatchError, match=r"this one steps \(its call 1\), rank 0 does what this one never did"):
        there.receive(into, 0).wait()
    assert not into.any()


# -----------------------------------------------------------------------------
# Between processes
# -----------------------------------------------------------------------------


@st.composite
def talks(draw: st.DrawFn, size: int) -> list[dict[str, int]]:
    """Messages as all ranks walk through them, each with how soon the receiver waits for an earlier one."""
    pairs = [(a, b) for a in range(size) for b in range(size) if a != b]
    one = st.fixed_dictionaries(
        {
            "pair": st.sampled_from(pairs),
            "bytes": st.sampled_from([1, 63, 64, 65, 1000, ROOM // 2, ROOM // 2 + 1, 3 * ROOM]),
            "seed": st.integers(0, 1 << 20),
            "waits": st.integers(0, 2),
        }
    )
    return draw(st.lists(one, min_size=1, max_size=60))


def follow(ours: HostGroup, rank: int, talk: list[dict[str, Any]]) -> None:
    """Send and expect in the order of the talk; wait for what is expected in another."""
    expected: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    sent: list[tuple[Any, torch.Tensor]] = []

    def wait_for(which: int) -> None:
        work, into, wanted = expected.pop(which % len(expected))
        work.wait()
        assert torch.equal(into, wanted)

    for each in talk:
        source, target = each["pair"]
        generator = torch.Generator().manual_seed(each["seed"])
        message = torch.randint(0, 256, (each["bytes"],), generator=generator, dtype=torch.uint8)
        if rank == source:
            work = ours.send(message, target)
            sent.append((work, message))
            if work is COMPLETED:
                message.zero_()  # it has been copied
        elif rank == target:
            into = torch.empty_like(message)
            expected.append((ours.receive(into, source), into, message))
            for _ in range(min(each["waits"], len(expected))):
                wait_for(each["seed"])
    while expected:
        wait_for(-1)
    for work, _ in sent:
        work.wait()


def with_little_room(rank: int, size: int) -> bool:
    channels.ROOM, channels._MOST_UNDER_WAY, host_group.LARGEST = ROOM, 5, ROOM // 2
    ours = group_of_all(rank, size)
    led_by_rank_0(rank, talks(size), lambda talk: follow(ours, rank, talk))
    return ours.memory is not None


@pytest.mark.parametrize("size", [2, 4])
def test_any_talk(size: int) -> None:
    assert all(run_on_processes(with_little_room, size, size))


def between_hosts(rank: int, size: int) -> bool:
    ours = group_of_all(rank, size, host="aabb"[rank])
    led_by_rank_0(rank, talks(size), lambda talk: follow(ours, rank, talk))
    return ours.shares_all


def test_ranks_on_two_hosts_talk_too() -> None:
    assert not any(run_on_processes(between_hosts, 4, 4))


# -----------------------------------------------------------------------------
# Ranks that are not there
# -----------------------------------------------------------------------------


def with_a_rank_that_dies(rank: int) -> tuple[str, float]:
    ours = group_of_all(rank, 2)
    if rank == 1:
        os._exit(17)
    began = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        ours.receive(torch.empty(8, dtype=torch.uint8), 1).wait()
    return str(error.value), time.monotonic() - began


def test_a_rank_that_died_is_named_at_once() -> None:
    text, seconds = run_on_processes(with_a_rank_that_dies, 2, deaths=True)[0]
    assert "rank 1 of the group ended" in text and seconds < 10


def with_a_rank_that_never_reads(rank: int) -> str:
    ours = group_of_all(rank, 2, GroupWaits(timeout=1.0))
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(RuntimeError) as error:
        for _ in range(channels._MOST_UNDER_WAY + 1):
            ours.send(torch.zeros(8, dtype=torch.uint8), 1)
    dist.barrier()
    return str(error.value)


def test_a_rank_that_never_reads_is_named_at_the_timeout() -> None:
    assert "no signal from rank 1" in run_on_processes(with_a_rank_that_never_reads, 2)[0]
