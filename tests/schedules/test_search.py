"""The search agrees with trying everything by hand, and moves the way the trade-offs say."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import Costs, Layer, Machine, balanced_cut, search

LAYER = Layer(1.0, 1.0, 1.0, activation=1.0, output=1.0, gradient=50.0, state=100.0)


def test_a_plan_is_what_its_simulation_says() -> None:
    """Two pipelines of two ranks, each with 8 of 16 samples in microbatches of 2: by hand."""
    machine = Machine(ranks=4, latency=3, bandwidth=2, reduce_bandwidth=10, overhead=0.5)
    found = search([LAYER] * 4, machine, batch=16, names=["1f1b"])
    (plan,) = [plan for plan in found if (plan.depth, plan.microbatch) == (2, 2)]
    work = 2 * 2 * 1.0 + 0.5
    timeline = schedules.simulate(schedules.one_f_one_b(2, 4), Costs(work, work, work, 3, 2.0, 2.0))
    assert plan.timeline.makespan == timeline.makespan
    assert plan.time == timeline.makespan + 2 * (1 / 2) * (2 * 50) / 10
    assert plan.memory == 2 * 100 + 2 * (2 * 2 * 1.0)
    assert (plan.replicas, plan.cuts) == (2, ((0, 2), (2, 4)))
    assert plan.schedule == schedules.one_f_one_b(2, 4)


def test_every_plan_fits_and_the_fastest_is_first() -> None:
    found = search([LAYER] * 8, Machine(ranks=4, memory=450, reduce_bandwidth=10), batch=16)
    assert all(plan.memory <= 450 for plan in found)
    assert [plan.time for plan in found] == sorted(plan.time for plan in found)
    assert {plan.depth for plan in found} == {2, 4}  # one rank alone would hold 800
    assert all(plan.replicas * plan.microbatch * plan.schedule.microbatches == 16 for plan in found)
    assert all(plan.replicas * plan.depth == 4 for plan in found)


def test_slow_reductions_ask_for_depth() -> None:
    fast, slow = (search([LAYER] * 8, Machine(ranks=4, reduce_bandwidth=rate), batch=32)[0] for rate in (1e9, 1.0))
    assert (fast.depth, slow.depth) == (1, 4)


def test_overhead_asks_for_larger_microbatches() -> None:
    free, dear = (
        search([LAYER] * 4, Machine(ranks=4, memory=300, overhead=cost), batch=32, names=["1f1b"])[0]
        for cost in (0, 20)
    )
    assert free.microbatch == 1 < dear.microbatch


def test_memory_chooses_the_schedule() -> None:
    """Unlimited, H2 waits least; where only a few activations fit, 1F1B is left."""
    heavy = Layer(1.0, 1.0, 1.0, activation=10.0)
    names = ["gpipe", "1f1b", "zb-h1", "zb-h2"]

    def best(memory: float) -> str:
        found = search([heavy] * 4, Machine(ranks=4, memory=memory, latency=1), batch=16, names=names)
        return next(plan.name for plan in found if plan.depth == 4)

    assert best(1000) == "zb-h2"
    assert best(40) == "zb-h1"


def test_two_copies_are_two_states() -> None:
    """DualPipe holds each stage twice and sums the copies' gradients even without replicas."""
    found = search([LAYER] * 4, Machine(ranks=4, reduce_bandwidth=10), batch=8, names=["dualpipe"])
    plan = next(plan for plan in found if plan.depth == 4)
    assert plan.memory == 2 * 100 + 5
    assert plan.time == plan.timeline.makespan + 2 * (1 / 2) * (2 * 50) / 10


def test_nothing_fits() -> None:
    with pytest.raises(
        ScheduleError, match=r"no plan fits in 50 bytes per rank; the smallest takes 101: ScheduleChoice\(name="
    ):
        search([LAYER] * 4, Machine(ranks=4, memory=50), batch=4)
    with pytest.raises(ScheduleError, match="can run 2 layers on 3 ranks with a batch of 4"):
        search([LAYER] * 2, Machine(ranks=3), batch=4, names=["1f1b"])


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: search([LAYER] * 4, Machine(4), batch=8, chunks=0),
            r"search\(chunks=0\): it is an integer of at least 1",
        ),
        (lambda: search([LAYER] * 4, Machine(4), batch=-8), r"search\(batch=-8\): it is an integer of at least 1"),
        (lambda: Machine(ranks=2.5), r"Machine\(ranks=2.5\): it is an integer of at least 1"),  # type: ignore[arg-type]
        (lambda: Machine(4, memory="80GB"), r"Machine\(memory='80GB'\): it is a number above 0"),  # type: ignore[arg-type]
        (lambda: Machine(4, bandwidth=0), r"Machine\(bandwidth=0\): it is a number above 0"),
        (lambda: Machine(4, latency=-1), r"Machine\(latency=-1\): it is a number of at least 0"),
        (lambda: Layer(-1.0, 1.0, 1.0), r"Layer\(forward=-1.0\): it is a number of at least 0"),
        (lambda: Layer(1.0, 1.0, 1.0, state=math.nan), r"Layer\(state=nan\): it is a number of at least 0"),
    ],
)
def test_numbers_that_nothing_can_be_planned_with(made: Callable[[], object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        made()


def test_arguments_of_another_kind() -> None:
    with pytest.raises(TypeError, match=r"takes an fp.schedules.Machine\(ranks=…, memory=…\), not 4"):
        search([LAYER] * 4, 4, batch=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"takes a list of schedules, \['1f1b'\], not one name"):
        search([LAYER] * 4, Machine(4), batch=8, names="1f1b")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9))
def test_cuts_are_the_best_of_all(times: list[int], parts: int) -> None:
    if parts > len(times):
        with pytest.raises(ScheduleError, match="cannot be cut"):
            balanced_cut(times, parts)
        return
    found = balanced_cut(times, parts)
    assert found[0][0] == 0 and found[-1][1] == len(times) and len(found) == parts
    assert all(first[1] == second[0] for first, second in pairwise(found)) and all(a < b for a, b in found)
    every = (pairwise((0, *inner, len(times))) for inner in combinations(range(1, len(times)), parts - 1))
    assert max(sum(times[a:b]) for a, b in found) == min(max(sum(times[a:b]) for a, b in cut) for cut in every)


def test_the_old_name_of_a_choice_warns() -> None:
    with pytest.warns(DeprecationWarning, match=r"write fp\.schedules\.ScheduleChoice"):
        assert schedules.Plan is schedules.ScheduleChoice
