"""The cut of a graph where its work is in balance: what trying every cut finds, in a pass per stage."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_parallel.pipelines import cut


def tried(places: dict[int, int], sums: list[float], stages: int) -> tuple[float, float] | None:
    """By trying all: what crosses and the largest stage of the best cut, no stage being free."""

    def stages_of(cuts: Any) -> list[float]:
        return [sums[b] - sums[a] for a, b in itertools.pairwise([0, *cuts, len(sums) - 1])]

    legal = [cuts for cuts in itertools.combinations(sorted(places), stages - 1) if min(stages_of(cuts)) > 0]
    if not legal:
        return None
    least = min(max(stages_of(cuts)) for cuts in legal)
    within = [cuts for cuts in legal if max(stages_of(cuts)) <= least * cut._SLACK]
    return min(sum(places[each] for each in cuts) for cuts in within), least


@given(st.lists(st.sampled_from([0, 0, 1, 2, 3, 7]), min_size=1, max_size=10), st.integers(1, 5), st.data())
def test_cuts_are_the_best_of_all(costs: list[int], stages: int, data: st.DataObject) -> None:
    sums = [0.0, *map(float, itertools.accumulate(costs))]
    chosen = data.draw(st.sets(st.integers(1, len(costs) - 1)) if len(costs) > 1 else st.just(set()))
    places = {place: data.draw(st.integers(0, 4)) for place in sorted(chosen)}
    best, found = tried(places, sums, stages), cut._least(places, sums, stages)
    if best is None or found is None:
        assert best is found is None
        return
    crossing, least = best
    parts = [sums[b] - sums[a] for a, b in itertools.pairwise([0, *found, len(sums) - 1])]
    assert len(parts) == stages and min(parts) > 0 and max(parts) <= least * cut._SLACK
    assert sum(places[each] for each in found) == crossing


class Counted(list[float]):
    """A list that counts how often it is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("search", [cut._least_largest, lambda c, s: cut._least_crossing(c, [1] * len(c), s, 1e9)])
def test_a_search_reads_in_proportion_to_the_model(search: Any) -> None:
    reads = []
    for length in (500, 2000):
        costs = Counted(map(float, range(length)))
        search(costs, 8)
        reads.append(costs.reads)
    assert reads[1] < 4.2 * reads[0]
