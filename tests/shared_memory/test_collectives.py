"""Collectives through shared memory give the mathematical result, in any size, with several under way at once."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_parallel.collectives import reference
from functional_parallel.errors import CollectiveError
from functional_parallel.runtime import communicator
from functional_parallel.shared_memory import collectives, slots
from functional_parallel.shared_memory import mapped_memory as shared_memory
from functional_parallel.shared_memory.mapped_memory import SharedMemory
from functional_parallel.shared_memory.packed import LazyBucket
from functional_parallel.shared_memory.start_collective import START
from functional_parallel.shared_memory.unpacked import BucketLayout
from sharding_specs import Mesh
from tests.processes import run_on_processes

from .groups import memory_of_all

EXAMPLES = 15
KINDS = tuple(START)
DTYPES = (torch.float64, torch.float32, torch.int32, torch.bfloat16, torch.uint8)


# -----------------------------------------------------------------------------
# What the ranks run
# -----------------------------------------------------------------------------

Case = dict[str, Any]


@st.composite
def cases(draw: st.DrawFn, longest: int = 300_001) -> list[Case]:
    """Collectives that are started one after the other, and waited for in the same order."""
    one = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "length": st.sampled_from([0, 1, 2, 3, 5, 7, 64, 1000, 4097, longest]),
            "dtype": st.sampled_from(DTYPES),
            "in_place": st.booleans(),
            "strided": st.booleans(),
            "packed": st.booleans(),
            "given_up": st.tuples(st.booleans(), st.booleans()),
            "real": st.booleans(),
            "seed": st.integers(0, 1000),
        }
    )
    return draw(st.lists(one, min_size=1, max_size=4))


def led_by_rank_0(rank: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Rank 0 draws examples and tells the others, so that all check the same ones."""

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def lead(example: Any) -> None:
        dist.broadcast_object_list([example], 0)
        check(example)

    if rank == 0:
        lead()
        dist.broadcast_object_list([None], 0)
        return
    while (example := told()) is not None:
        check(example)


def told() -> Any:
    box: list[Any] = [None]
    dist.broadcast_object_list(box, 0)
    return box[0]


def start(memory: SharedMemory, case: Case) -> Callable[[], None]:
    """Start a collective; what is returned waits for it and compares."""
    size, rank = memory.size, memory.rank
    operands = [operand(case, source, size) for source in range(size)]
    mine, kind = operands[rank], case["kind"]
    layout, kept, params = None, [], (0,)
    if kind == "psum":
        wanted, x = [reference.psum(operands)[rank].clone()], sent(case, mine, 1)
        params = ()
        if case["packed"]:
            both = leaves(case, mine, 1)
            x = LazyBucket(both, 1, [0, 0], case["given_up"])
            kept = [(each, each.clone()) for each, is_free in zip(both, case["given_up"], strict=True) if not is_free]
            lengths = [each.numel() for each in both]
            wanted = list(wanted[0].split(lengths))
            layout = BucketLayout(1, ((0, (lengths[0],), 0), (lengths[0], (lengths[1],), 0)))
    elif kind == "psum_scatter":
        wanted, x = [reference.psum_scatter(operands, 0)[rank]], sent(case, mine, size)
    elif kind == "all_gather":
        wanted, x = [torch.cat(operands)], sent(case, mine, 1)
        if case["packed"]:
            parts = [leaves(case, x, 1) for x in operands]
            wanted = [torch.cat([part[index] for part in parts], index) for index in range(2)]
            first, second = parts[rank]
            layout = BucketLayout(size, ((0, tuple(first.shape), 0), (first.numel(), tuple(second.shape), 1)))
    else:
        wanted, x, params = [torch.cat([each.chunk(size, 0)[rank] for each in operands])], mine, (0, 0)
    steps, result = START[kind](memory, x, *params, overwrite=case["in_place"], layout=layout)
    running = memory.run(steps)

    def finish() -> None:
        running.wait()
        found = result()
        results = [found] if layout is None else [found.take(index) for index in (1, 0)][::-1]
        assert all(map(torch.equal, results, wanted)), case
        assert all(torch.equal(now, before) for now, before in kept), case

    return finish


def sent(case: Case, x: Tensor, parts: int) -> Tensor | LazyBucket:
    return LazyBucket(leaves(case, x, parts), parts, [0, 1]) if case["packed"] else x


def leaves(case: Case, x: Tensor, parts: int) -> list[Tensor]:
    """Two tensors that packed make a flat one: the first is cut in parts along its first dim, the other its second."""
    first, second = x.reshape(parts, -1).tensor_split([case["seed"] % 7], dim=1)
    rows = 2 if second.shape[1] % 2 == 0 else 1
    return [first.reshape(-1), second.unflatten(1, (rows, -1)).movedim(0, 1).flatten(1)]


def operand(case: Case, source: int, size: int) -> Tensor:
    """What a rank brings: whole chunks where the collective splits it. Sums are in rank order, so any numbers do."""
    generator = torch.Generator().manual_seed(case["seed"] + 1000 * source)
    length = case["length"] if case["kind"] in ("psum", "all_gather") else case["length"] * size
    if case["real"] and case["dtype"].is_floating_point:
        values = torch.randn(length, 2, generator=generator, dtype=torch.float64).to(case["dtype"])
    else:
        values = torch.randint(0, 8, (length, 2), generator=generator).to(case["dtype"])
    return values[:, 0] if case["strided"] else values[:, 0].contiguous()


def all_kinds(rank: int, size: int, longest: int = 300_001, repeat: int = 1) -> None:
    memory = memory_of_all(rank, size)

    def check(several: list[Case]) -> None:
        for finish in [start(memory, case) for case in several * repeat]:
            finish()

    led_by_rank_0(rank, cases(longest), check)


# -----------------------------------------------------------------------------
# What must hold
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective_gives_the_mathematical_result(size: int) -> None:
    run_on_processes(all_kinds, size, size, timeout=240)


def small_halves(rank: int, size: int) -> None:
    """So little memory that halves are left all the time, and that large operands go in many pieces."""
    shared_memory.HALF = 1 << 14
    slots.AT_ONCE, slots.PIECE = 1 << 12, 1 << 10
    all_kinds(rank, size, 30_001, repeat=3)


def sums_over_operands(rank: int, size: int) -> None:
    """Tensors of a large bucket that nobody needs any more become their sums; the others stay as they are."""
    memory = memory_of_all(rank, size)
    length = slots.AT_ONCE // 4
    free, turned, kept = torch.ones(length), torch.ones(2, length)[:, ::2].t(), torch.ones(3)
    layout = BucketLayout(1, ((0, (length,), 0), (length, (length,), 0), (2 * length, (3,), 0)))
    packed = LazyBucket([free, turned, kept], 1, [0, 0, 0], [True, True, False])
    steps, result = START["psum"](memory, packed, overwrite=False, layout=layout)
    memory.run(steps).wait()
    sums = [result().take(index) for index in range(3)]
    assert all((each == size).all() for each in sums)
    assert sums[0].data_ptr() == free.data_ptr()
    assert (turned == 1).all() and (kept == 1).all()


@pytest.mark.parametrize("size", [2, 3])
def test_a_large_bucket_needs_no_memory_of_its_own(size: int) -> None:
    run_on_processes(sums_over_operands, size, size)


def a_late_reader(rank: int, size: int) -> None:
    """Rank 0 fills both halves and wants the first one again, long before rank 1 has read it."""
    shared_memory.HALF = 1 << 14
    memory = memory_of_all(rank, size)
    for number in range(3):
        gathers_under_way(memory, [1 << 11] * 16, first=64 * number, pause=0.3)


def gathers_under_way(memory: SharedMemory, lengths: list[int], *, first: int = 0, pause: float) -> None:
    """Gathers of so many bytes, all started before one is read; rank 1 begins to read after so many seconds."""
    results, running = [], []
    for index, length in enumerate(lengths):
        mine = torch.full((length,), first + 2 * index + memory.rank, dtype=torch.uint8)
        results.append(mine.new_empty(memory.size, length))
        running.append(memory.run(collectives.all_gather(memory, mine, results[-1].unbind())))
    if memory.rank == 1:
        time.sleep(pause)
    for index, (result, each) in enumerate(zip(results, running, strict=True)):
        each.wait()
        for source in range(memory.size):
            assert (result[source] == first + 2 * index + source).all(), (first, lengths, index, source)


def test_nobody_writes_over_what_is_not_read_yet() -> None:
    run_on_processes(a_late_reader, 2, 2)


def growing_halves(rank: int, size: int) -> list[int]:
    """Bytes of shared memory that this rank maps: nothing yet, after small ones, with a large one among them."""
    memory = memory_of_all(rank, size)
    held = [shared_bytes()]
    for length in (100, 1 << 20):
        gathers_under_way(memory, [100, 5000, length, 100, length, 7], pause=0.1)
        held.append(shared_bytes())
        dist.barrier()
    return held


def shared_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssShmem"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is shared")
def test_halves_grow_to_what_is_asked_of_them() -> None:
    for before, small, large in run_on_processes(growing_halves, 2, 2):
        page, halves = 2 * 4096, 2 * 2  # of two ranks
        assert before < 64 << 10
        assert abs(small - before - halves * (256 << 10)) <= halves * page
        assert abs(large - before - halves * (1 << 20)) <= halves * page


@pytest.mark.parametrize("size", [2, 4])
def test_memory_that_is_used_again_and_again(size: int) -> None:
    run_on_processes(small_halves, size, size, timeout=240)


# -----------------------------------------------------------------------------
# Failing
# -----------------------------------------------------------------------------


def with_a_rank_that_dies(rank: int, size: int) -> tuple[str, float]:
    """One good sum, and a second one that rank 1 does not come to."""
    carrier = communicator(Mesh(data=size), algorithm="shared")
    assert carrier.psum(torch.ones(3), ("data",)).tolist() == [size] * 3
    began = time.monotonic()
    if rank == 1:
        os._exit(17)
    with pytest.raises(CollectiveError) as caught:
        carrier.psum(torch.ones(3), ("data",))
    return str(caught.value), time.monotonic() - began


def test_a_rank_that_dies_is_named_at_once_and_leaves_nothing() -> None:
    before = in_shared_memory()
    results = run_on_processes(with_a_rank_that_dies, 3, 3, deaths=True)
    assert results[1] == 17
    for rank in (0, 2):
        message, seconds = results[rank]
        assert f"rank {rank} (data={rank}): psum over ('data',) of float32[3] failed after" in message
        assert "rank 1 (data=1) ended" in message
        assert seconds < 10, "long before the timeout"
    assert in_shared_memory() <= before


def in_shared_memory() -> set[str]:
    return (
        {name for name in os.listdir("/dev/shm") if "functional_parallel" in name}
        if os.path.isdir("/dev/shm")
        else set()
    )


def with_a_rank_that_does_not_come(rank: int) -> str:
    carrier = communicator(Mesh(data=2), algorithm="shared", timeout=timedelta(seconds=1))
    carrier.psum(torch.ones(3), ("data",))
    message = ""
    if rank == 0:
        with pytest.raises(CollectiveError) as caught:
            carrier.all_gather(torch.ones(3), ("data",), 0)
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_rank_that_does_not_come_is_named_at_the_timeout() -> None:
    message = run_on_processes(with_a_rank_that_does_not_come, 2)[0]
    assert "rank 0 (data=0): all_gather over ('data',) of float32[3] failed after 1." in message
    assert "no signal from rank 1 (data=1) in 1." in message
