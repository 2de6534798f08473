"""Bubbles and peaks follow the published formulas for any costs, not for equal ones alone."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from functional_parallel import schedules
from functional_parallel.schedules import Costs, Timeline

from .cases import made

RANKS = st.integers(1, 8)
TIME = st.integers(1, 12)
FALLING = st.tuples(TIME, TIME, TIME).map(lambda costs: sorted(costs, reverse=True))


def timeline(name: str, ranks: int, microbatches: int, costs: tuple[int, int, int], chunks: int = 2) -> Timeline:
    return schedules.simulate(made(name, ranks, microbatches, chunks), Costs(*costs))


@given(RANKS, st.integers(1, 16), st.tuples(TIME, TIME, TIME))
def test_one_stage_per_rank(ranks: int, microbatches: int, costs: tuple[int, int, int]) -> None:
    work = sum(costs)
    for name in ("gpipe", "1f1b", "eager-1f1b"):
        found = timeline(name, ranks, microbatches, costs)
        assert found.bubble == found.span_bubble == (ranks - 1) * work
        assert found.bubble_fraction == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-12)
    assert timeline("naive", ranks, microbatches, costs).bubble == microbatches * (ranks - 1) * work


@given(RANKS, st.integers(1, 3), st.integers(1, 3), st.tuples(TIME, TIME, TIME))
def test_several_stages_per_rank(ranks: int, groups: int, chunks: int, costs: tuple[int, int, int]) -> None:
    microbatches = groups * ranks
    for name in ("interleaved", "looped-bfs"):
        found = timeline(name, ranks, microbatches, costs, chunks)
        assert found.bubble == (ranks - 1) * sum(costs)
        assert found.bubble_fraction == pytest.approx((ranks - 1) / (chunks * microbatches + ranks - 1), abs=1e-12)


@given(RANKS, st.integers(0, 8), st.tuples(TIME, TIME, TIME))
def test_zero_bubble(ranks: int, more: int, costs: tuple[int, int, int]) -> None:
    """The region in which the forms hold: weight gradients no longer than the other two."""
    forward, inputs, weights = costs
    assume(weights <= inputs and weights <= forward)
    microbatches = 2 * ranks - 1 + more
    assert timeline("zb-h1", ranks, microbatches, costs).bubble == (ranks - 1) * (forward + inputs - weights)
    h2 = timeline("zb-h2", ranks, microbatches, costs)
    assert h2.span_bubble == (ranks - 1) * (forward + inputs - 2 * weights)


@given(RANKS, st.integers(0, 8))
def test_equal_costs(ranks: int, more: int) -> None:
    """H1 has a third of 1F1B's bubble; H2 and V never wait between their first action and their last."""
    microbatches = 2 * ranks - 1 + more
    unit = (1, 1, 1)
    assert 3 * timeline("zb-h1", ranks, microbatches, unit).bubble == timeline("1f1b", ranks, microbatches, unit).bubble
    for name in ("zb-h2", "zb-v"):
        found = timeline(name, ranks, microbatches, unit)
        assert (found.span_bubble, found.bubble) == (0, ranks - 1)


@given(RANKS, st.integers(0, 8), FALLING)
def test_folded_zero_bubble(ranks: int, more: int, costs: list[int]) -> None:
    inputs, forward, weights = costs
    found = timeline("zb-v", ranks, 2 * ranks - 1 + more, (forward, inputs, weights))
    assert found.bubble == (ranks - 1) * max(inputs, 2 * (inputs - weights))
    assert found.span_bubble == (ranks - 1) * 2 * (inputs - weights)


@given(st.integers(1, 4), st.integers(0, 4), FALLING)
def test_dualpipe(half: int, more: int, costs: list[int]) -> None:
    """Pairs run one after the other but as one action; the published form holds at F = I, this one where F ≥ I ≥ W."""
    forward, inputs, weights = costs
    pair = forward + inputs + weights
    ranks = 2 * half
    priced = Costs(*costs, overlap=0.0)
    double = schedules.simulate(made("dualpipe", ranks, 2 * ranks + 2 * more), priced)
    assert double.bubble == (half - 1) * (pair + forward - 2 * weights)
    folded = schedules.simulate(made("dualpipe-v", ranks, 2 * ranks + more), priced)
    assert folded.bubble == (ranks - 1) * (pair + forward - 2 * weights)


@pytest.mark.parametrize("ranks", range(2, 10))
def test_controllable_memory(ranks: int) -> None:
    """The bubble does not depend on the microbatches from twice the ranks on; the peaks are closed forms."""
    half = 2 * (ranks // 2 + 1)
    least = 2 * -(-(ranks + 2) // 3)
    for microbatches in (2 * ranks, 3 * ranks):
        found = {name: timeline(name, ranks, microbatches, (1, 1, 1)) for name in ("v-half", "v-min")}
        assert (max(found["v-half"].peaks), max(found["v-min"].peaks)) == (half, least)
        assert found["v-min"].bubble == 4 * ranks - (7 if ranks % 3 == 0 else 5)
        if ranks > 2:
            assert found["v-half"].bubble == 3 * ranks - (4 if ranks % 2 else 7)


@given(RANKS, st.integers(1, 16))
def test_peaks(ranks: int, microbatches: int) -> None:
    def peak(name: str) -> list[int]:
        return list(schedules.peaks(made(name, ranks, microbatches)))

    every = range(ranks)
    assert peak("naive") == [1] * ranks
    assert peak("gpipe") == [microbatches] * ranks
    assert peak("1f1b") == peak("pipedream") == [min(ranks - r, microbatches) for r in every]
    assert peak("eager-1f1b") == [min(2 * (ranks - r) - 1, microbatches) for r in every]
    assert peak("looped-bfs") == [2 * microbatches] * ranks
    assert peak("zb-h1") == [min(ranks, microbatches)] * ranks
    assert peak("zb-h2") == [min(2 * ranks - 1, microbatches)] * ranks
    if microbatches >= 2 * ranks - 1:
        assert peak("zb-v") == [min(2 * ranks, 2 * microbatches)] * ranks
    if microbatches >= 2 * ranks:
        assert peak("dualpipe-v") == [2 * ranks + 1] * ranks
    if microbatches >= 2 * ranks and microbatches % 2 == ranks % 2 == 0:
        assert peak("dualpipe") == [ranks + 1] * ranks


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_peaks_of_interleaved(ranks: int, chunks: int, groups: int) -> None:
    total = chunks * groups * ranks
    expected = [min(2 * (ranks - 1 - r) + (chunks - 1) * ranks + 1, total) for r in range(ranks)]
    assert list(schedules.peaks(made("interleaved", ranks, groups * ranks, chunks))) == expected


@pytest.mark.parametrize(
    ("ranks", "microbatches", "limit", "costs", "span"),
    [
        (4, 8, 4, (1, 1, 1), 3),
        (4, 8, 6, (1, 1, 1), 1),
        (4, 8, 7, (1, 1, 1), 0),
        (8, 24, 8, (1, 1, 1), 7),
        (8, 24, 12, (1, 1, 1), 3),
        (8, 24, 15, (1, 1, 1), 0),
        (4, 12, 4, (10, 11, 7), 42),
        (4, 12, 8, (10, 11, 7), 14),
    ],
)
def test_search_is_no_worse_than_another_one(
    ranks: int, microbatches: int, limit: int, costs: tuple[int, int, int], span: float
) -> None:
    """The figures of a published heuristic at the same limit."""
    found = schedules.zb_auto(ranks, microbatches, limit, Costs(*costs))
    schedules.check(found)
    assert max(schedules.peaks(found)) <= limit
    assert schedules.simulate(found, Costs(*costs)).span_bubble <= span


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 12), st.tuples(TIME, TIME, TIME), st.integers(0, 3))
def test_search_stays_within_its_limit(
    ranks: int, microbatches: int, limit: int, costs: tuple[int, int, int], latency: int
) -> None:
    priced = Costs(*costs, latency=latency)
    found = schedules.zb_auto(ranks, microbatches, limit, priced)
    schedules.check(found)
    assert max(schedules.peaks(found)) <= limit
    for other in (schedules.zb_h1(ranks, microbatches), schedules.zb_h2(ranks, microbatches)):
        if max(schedules.peaks(other)) <= limit:
            assert schedules.simulate(found, priced).span_bubble <= schedules.simulate(other, priced).span_bubble
