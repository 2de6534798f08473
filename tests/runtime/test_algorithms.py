"""Every algorithm gives the mathematical result, on real processes, in any size, with several under way at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from functional_parallel.collectives import group
from functional_parallel.runtime.algorithms import ALGORITHMS, Team, shared_memory
from tests.processes import run_on_processes

EXAMPLES = 40
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
DTYPES = (torch.float64, torch.float32, torch.int32, torch.bfloat16, torch.uint8)


# -----------------------------------------------------------------------------
# What the ranks run
# -----------------------------------------------------------------------------

Case = dict[str, Any]


@st.composite
def cases(draw: st.DrawFn) -> list[Case]:
    """Collectives that are started one after the other, and waited for in the same order."""
    one = st.fixed_dictionaries(
        {
            "kind": st.sampled_from(KINDS),
            "length": st.sampled_from([0, 1, 2, 3, 5, 7, 64, 1000, 4097, 300_001]),
            "dtype": st.sampled_from(DTYPES),
            "in_place": st.booleans(),
            "strided": st.booleans(),
            "seed": st.integers(0, 1000),
        }
    )
    return draw(st.lists(one, min_size=1, max_size=4))


def led_by_rank_0(rank: int, strategy: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Rank 0 draws examples and tells the others, so that all check the same ones."""

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
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


def start(team: Team, name: str, case: Case) -> Callable[[], None]:
    """Start a collective; what is returned waits for it and compares."""
    algorithm, size, rank = ALGORITHMS[name], team.size, team.rank
    operands = [operand(case, source, size) for source in range(size)]
    mine, kind = operands[rank], case["kind"]
    if kind == "all_reduce":
        results = [mine if case["in_place"] and mine.is_contiguous() else empty(mine)]
        steps = algorithm.all_reduce(team, mine, results[0], None)
        wanted = [group.psum(operands)[rank].clone()]
    elif kind == "reduce_scatter":
        results = [empty(mine.chunk(size, 0)[rank])]
        steps = algorithm.reduce_scatter(team, mine.chunk(size, 0), results[0], None)
        wanted = [group.psum_scatter(operands, 0)[rank]]
    elif kind == "all_gather":
        results = list(mine.new_empty(size, *mine.shape).unbind())
        steps, wanted = algorithm.all_gather(team, mine, results), operands
    else:
        results = list(mine.new_empty(size, *mine.chunk(size, 0)[0].shape).unbind())
        steps = (algorithm.all_to_all or ALGORITHMS["direct"].all_to_all)(team, mine.chunk(size, 0), results)
        wanted = [each.chunk(size, 0)[rank] for each in operands]
    running = team.run(steps)

    def finish() -> None:
        running.wait()
        for result, want in zip(results, wanted, strict=True):
            assert torch.equal(result, want), (name, case)

    return finish


def operand(case: Case, source: int, size: int) -> Tensor:
    """What a rank brings: small integers, so that sums are exact; whole chunks where the collective splits it."""
    generator = torch.Generator().manual_seed(case["seed"] + 1000 * source)
    length = case["length"] if case["kind"] in ("all_reduce", "all_gather") else case["length"] * size
    values = torch.randint(0, 8, (length, 2), generator=generator).to(case["dtype"])
    return values[:, 0] if case["strided"] else values[:, 0].contiguous()


def empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def teams(rank: int, size: int) -> Iterator[tuple[Team, list[str]]]:
    """This host as it is, and as if it were two where that makes two levels."""
    everyone = list(range(size))
    whole = Team(dist.group.WORLD, rank, everyone)
    yield whole, [name for name, each in ALGORITHMS.items() if each.refuses(whole) is None]
    if size == 4:
        for hosts in ("aabb", "abab"):
            apart = Team(dist.group.WORLD, rank, everyone, host=hosts[rank])
            yield apart, [name for name, each in ALGORITHMS.items() if each.refuses(apart) is None]


def all_algorithms(rank: int, size: int) -> list[list[str]]:
    found = []
    for team, names in teams(rank, size):
        found.append(names)

        def check(several: list[Case], team: Team = team, names: list[str] = names) -> None:
            for name in names:
                for finish in [start(team, name, case) for case in several]:
                    finish()

        led_by_rank_0(rank, cases(), check)
    return found


# -----------------------------------------------------------------------------
# What must hold
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_algorithm_gives_the_mathematical_result(size: int) -> None:
    for found in run_on_processes(all_algorithms, size, size, timeout=240):
        assert found[0] == ["shared", "direct", "halving", "ring", "naive"]
        assert all(names == ["direct", "halving", "ring", "two_level", "naive"] for names in found[1:])


def small_halves(rank: int, size: int) -> int:
    """So little memory that halves are left all the time, and that large operands go in many pieces."""
    from functional_parallel.runtime.algorithms import connect, shared

    shared_memory.HALF = connect.HALF = 1 << 14
    shared.AT_ONCE, shared.PIECE = 1 << 12, 1 << 10
    team = Team(dist.group.WORLD, rank, list(range(size)))

    def check(several: list[Case]) -> None:
        for finish in [start(team, "shared", case) for case in several * 3]:
            finish()

    led_by_rank_0(rank, cases(), check)
    return len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0


@pytest.mark.parametrize("size", [2, 4])
def test_memory_that_is_used_again_and_again(size: int) -> None:
    run_on_processes(small_halves, size, size, timeout=240)
