"""Every schedule passes the checker all over its domain, and outside it the error names rule and nearest numbers."""

from __future__ import annotations

import re

import pytest

from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import FAMILIES

from .cases import everywhere, in_domain, made


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["one in five", "all"])
@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_legal_all_over_its_domain(name: str, step: int) -> None:
    """And its messages need no tags and cannot hang, even when a send waits for its receive."""
    legal = 0
    for ranks, microbatches, chunks in list(everywhere(name))[::step]:
        if not in_domain(name, ranks, microbatches):
            with pytest.raises(ScheduleError, match="the nearest that it takes"):
                made(name, ranks, microbatches, chunks)
            continue
        schedule = made(name, ranks, microbatches, chunks)
        assert schedules.check(schedule) is schedule
        assert (schedule.ranks, schedule.microbatches) == (ranks, microbatches)
        messages = schedules.messages(schedule)
        schedules.check_messages(schedule, messages)
        assert [[each for each in row if isinstance(each, schedules.Action)] for row in messages] == [
            list(row) for row in schedule.actions
        ]
        schedules.simulate(schedule)
        legal += 1
    assert legal >= 16 // step


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("dualpipe", (3, 8), "dualpipe takes an even number of stages; got stages=3, .*: stages=2 and 4"),
        ("dualpipe", (4, 7), "at least twice the stages; got microbatches=7 with stages=4, .*: microbatches=8"),
        ("dualpipe", (4, 9), "microbatches=9 with stages=4, .*: microbatches=8 and 10"),
        ("dualpipe-v", (8, 3), "at least one microbatch per stage; .*: microbatches=8"),
        ("zb-v", (5, 3), "multiple of the chunks per rank; got stages=5 with chunks=2, .*: stages=4 and 6"),
        ("interleaved", (8, 9), "microbatches=9 with 4 ranks, .*: microbatches=8 and 10"),
        ("interleaved", (7, 8), "got stages=7 with chunks=2, .*: stages=6 and 8"),
        ("2bw", (4, 6), "full batches of microbatches; got microbatches=6 with batch=4, .*: microbatches=4 and 8"),
        ("gpipe", (0, 4), "at least 1 stage; got stages=0, .*: stages=1"),
        ("naive", (2, 0), "at least 1 microbatch; got microbatches=0, .*: microbatches=1"),
    ],
)
def test_the_nearest_legal_numbers_are_named_and_legal(name: str, numbers: tuple[int, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        schedules.get(name)(*numbers)
    argument, nearest = re.findall(r"(\w+)=([\d and]+)$", str(caught.value))[0]
    arguments = dict(zip(("stages", "microbatches"), numbers, strict=True))
    for number in map(int, nearest.split(" and ")):
        fixed = arguments | {argument: number}
        if argument == "stages":
            fixed["microbatches"] = 4 * number
        schedules.check(schedules.get(name)(**fixed))


def test_other_arguments_are_checked() -> None:
    with pytest.raises(ScheduleError, match=r"batch=3 with stages=4, .*: batch=4"):
        schedules.two_bw(4, 12, batch=3)
    with pytest.raises(ScheduleError, match="limit=0"):
        schedules.zb_auto(4, 8, limit=0)
    with pytest.raises(ScheduleError, match="chunks=0"):
        schedules.breadth_first(4, 8, chunks=0)
    with pytest.raises(ScheduleError, match="no schedule '1f2b'; there are naive, gpipe, 1f1b"):
        schedules.get("1f2b")


def test_names_of_the_same_schedule() -> None:
    for other, name in (
        ("bfs", "looped-bfs"),
        ("dualpipev", "dualpipe-v"),
        ("pipedream-flush", "1f1b"),
        ("zb_h1", "zb-h1"),
    ):
        assert schedules.get(other) is schedules.get(name)
        assert schedules.for_ranks(other, 2, 4, chunks=3) == schedules.for_ranks(name, 2, 4, chunks=3)


def test_the_names_that_scripts_use_are_the_names() -> None:
    wanted = (
        "naive gpipe 1f1b eager-1f1b interleaved looped-bfs zb-h1 zb-h2 zb-v v-half v-min zb-auto dualpipe dualpipe-v"
    )
    assert set(wanted.split()) <= set(FAMILIES)
    assert [schedules.for_ranks(name, 2, 4).name for name in FAMILIES] == list(FAMILIES)
