"""Action tables, times and peaks as published; the numbers come from an independent simulator and from papers."""

from __future__ import annotations

import re

import pytest

from functional_parallel import schedules
from functional_parallel.schedules import Costs

from .cases import made

# name, ranks, microbatches, chunks: makespan, bubble, span bubble, peak per rank, with F = I = W = 1 per stage.
TABLE = """
naive 2 4 1 24 12 12 1,1
gpipe 2 4 1 15 3 3 4,4
1f1b 2 4 1 15 3 3 2,1
eager-1f1b 2 4 1 15 3 3 3,1
interleaved 2 4 2 27 3 3 5,3
looped-bfs 2 4 2 27 3 3 8,8
interleaved 2 4 4 51 3 3 9,7
looped-bfs 2 4 4 51 3 3 16,16
zb-h1 2 4 1 13 1 1 2,2
zb-h2 2 4 1 13 1 0 3,3
zb-v 2 4 2 25 1 0 4,4
v-half 2 4 2 25 1 1 4,4
v-min 2 4 2 27 3 3 3,4
dualpipe-v 2 4 2 25 1 1 5,5
dualpipe 2 4 2 12 0 0 3,3
naive 4 4 1 48 36 36 1,1,1,1
gpipe 4 4 1 21 9 9 4,4,4,4
1f1b 4 4 1 21 9 9 4,3,2,1
eager-1f1b 4 4 1 21 9 9 4,4,3,1
interleaved 4 4 2 33 9 9 8,8,7,5
looped-bfs 4 4 2 33 9 9 8,8,8,8
interleaved 4 4 4 57 9 9 16,16,15,13
looped-bfs 4 4 4 57 9 9 16,16,16,16
zb-h1 4 4 1 15 3 3 4,4,4,4
zb-h2 4 4 1 16 4 3 4,4,4,4
zb-v 4 4 2 30 6 6 5,6,7,8
v-half 4 4 2 34 10 10 5,6,6,6
v-min 4 4 2 35 11 11 4,4,4,4
naive 4 8 1 96 72 72 1,1,1,1
gpipe 4 8 1 33 9 9 8,8,8,8
1f1b 4 8 1 33 9 9 4,3,2,1
eager-1f1b 4 8 1 33 9 9 7,5,3,1
interleaved 4 8 2 57 9 9 11,9,7,5
looped-bfs 4 8 2 57 9 9 16,16,16,16
interleaved 4 8 4 105 9 9 19,17,15,13
looped-bfs 4 8 4 105 9 9 32,32,32,32
zb-h1 4 8 1 27 3 3 4,4,4,4
zb-h2 4 8 1 27 3 0 7,7,7,7
zb-v 4 8 2 51 3 0 8,8,8,8
v-half 4 8 2 53 5 5 6,6,6,6
v-min 4 8 2 59 11 11 4,4,4,4
dualpipe-v 4 8 2 51 3 3 9,9,9,9
dualpipe 4 8 2 25 1 1 5,5,5,5
naive 8 16 1 384 336 336 1,1,1,1,1,1,1,1
gpipe 8 16 1 69 21 21 16,16,16,16,16,16,16,16
1f1b 8 16 1 69 21 21 8,7,6,5,4,3,2,1
eager-1f1b 8 16 1 69 21 21 15,13,11,9,7,5,3,1
interleaved 8 16 2 117 21 21 23,21,19,17,15,13,11,9
looped-bfs 8 16 2 117 21 21 32,32,32,32,32,32,32,32
interleaved 8 16 4 213 21 21 39,37,35,33,31,29,27,25
looped-bfs 8 16 4 213 21 21 64,64,64,64,64,64,64,64
zb-h1 8 16 1 55 7 7 8,8,8,8,8,8,8,8
zb-h2 8 16 1 55 7 0 15,15,15,15,15,15,15,15
zb-v 8 16 2 103 7 0 16,16,16,16,16,16,16,16
v-half 8 16 2 113 17 17 10,10,10,10,10,10,10,10
v-min 8 16 2 123 27 27 7,8,8,8,8,8,8,8
dualpipe-v 8 16 2 103 7 7 17,17,17,17,17,17,17,17
dualpipe 8 16 2 51 3 3 9,9,9,9,9,9,9,9
"""


@pytest.mark.parametrize("line", TABLE.split("\n")[1:-1])
def test_times_and_peaks(line: str) -> None:
    name, ranks, microbatches, chunks, makespan, bubble, span, peak = line.split()
    schedule = made(name, int(ranks), int(microbatches), int(chunks))
    timeline = schedules.simulate(schedule)
    assert (timeline.makespan, timeline.bubble, timeline.span_bubble) == (int(makespan), int(bubble), int(span))
    assert timeline.bubble_fraction == pytest.approx(int(bubble) / int(makespan), abs=1e-12)
    assert list(schedules.peaks(schedule)) == list(timeline.peaks) == [int(number) for number in peak.split(",")]


# Time from left to right; "-" is the second unit of a backward.
GRIDS = {
    "gpipe": """
F0 F1 F2 F3 F4 F5 F6 F7 . . . . . . . . . B0-B1-B2-B3-B4-B5-B6-B7-
. F0 F1 F2 F3 F4 F5 F6 F7 . . . . . . B0-B1-B2-B3-B4-B5-B6-B7-. .
. . F0 F1 F2 F3 F4 F5 F6 F7 . . . B0-B1-B2-B3-B4-B5-B6-B7-. . . .
. . . F0 F1 F2 F3 F4 F5 F6 F7 B0-B1-B2-B3-B4-B5-B6-B7-. . . . . .""",
    "1f1b": """
F0 F1 F2 F3 . . . . . . B0-F4 B1-F5 B2-F6 B3-F7 B4-. B5-. B6-. B7-
. F0 F1 F2 . . . . B0-F3 B1-F4 B2-F5 B3-F6 B4-F7 B5-. B6-. B7-. .
. . F0 F1 . . B0-F2 B1-F3 B2-F4 B3-F5 B4-F6 B5-F7 B6-. B7-. . . .
. . . F0 B0-F1 B1-F2 B2-F3 B3-F4 B4-F5 B5-F6 B6-F7 B7-. . . . . .""",
    "zb-h1": """
F0 F1 F2 F3 . . . I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7
. F0 F1 F2 . . I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7
. . F0 F1 . I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7
. . . F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7""",
    "zb-h2": """
F0 F1 F2 F3 F4 F5 F6 I0 W0 F7 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7 . . .
. F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 F7 I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7 . .
. . F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 F7 I5 W1 I6 W2 I7 W3 W4 W5 W6 W7 .
. . . F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 F7 I7 W1 W2 W3 W4 W5 W6 W7""",
}


@pytest.mark.parametrize("name", GRIDS)
def test_grid_of_four_ranks_and_eight_microbatches(name: str) -> None:
    events = schedules.simulate(made(name, 4, 8)).events
    for rank, line in enumerate(GRIDS[name].split("\n")[1:]):
        expected, now = [], 0
        for token in re.findall(r"[FBIW]\d-?|\.", line):
            length = 1 + token.endswith("-")
            if token != ".":
                expected.append((token.rstrip("-"), now, now + length))
            now += length
        assert [(event.action.kind + str(event.action.microbatch), *event[2:]) for event in events[rank]] == expected


ORDERS = {
    ("interleaved", 4, 8): {
        0: "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4 4B2 4F5 4B3 4F6 0B0 4F7 0B1 0B2 0B3 4B4 "
        "4B5 4B6 4B7 0B4 0B5 0B6 0B7",
        3: "3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3F4 3B0 3F5 3B1 3F6 3B2 3F7 3B3 7F4 7B4 7F5 7B5 7F6 "
        "7B6 7F7 7B7 3B4 3B5 3B6 3B7",
    },
    ("interleaved", 2, 4): {
        0: "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        1: "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    },
    ("zb-v", 2, 4): {
        0: "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        1: "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    },
    ("zb-v", 4, 8): {
        0: "0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0F7 0I0 0W0 7F4 7I4 7W4 "
        "0I1 0W1 7F5 7I5 7W5 0I2 0W2 7F6 7I6 7W6 0I3 0W3 7F7 7I7 7W7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7",
        3: "3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3F4 3I0 3W0 4F4 4I1 4W1 3F5 3I1 3W1 4F5 4I2 4W2 3F6 3I2 3W2 "
        "4F6 4I3 4W3 3F7 3I3 3W3 4F7 4I4 4W4 3I4 4I5 3I5 4I6 3I6 4I7 3I7 3W4 4W5 4W6 4W7 3W5 3W6 3W7",
    },
    ("v-half", 2, 4): {
        0: "0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 3W1 3F2 0W0 0F3 0I1 3I2 3W2 3F3 3I3 0I2 3W3 0I3 0W1 0W2 0W3",
        1: "1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 2W3 1W2 1W3",
    },
    ("dualpipe-v", 2, 4): {
        0: "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2 (3F3;0B1) 3B3 0I2 0W2 0I3 0W3",
        1: "1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2 1B2 2I3 1I3 2W3 1W3",
    },
    ("dualpipe", 2, 4): {
        0: "0F0 3F0 0F1 3B0 (3F1;0B0) 3B1 0I1 0W1",
        1: "2F0 1F0 2F1 1B0 (1F1;2B0) 1B1 2I1 2W1",
    },
}


@pytest.mark.parametrize("case", ORDERS, ids=str)
def test_orders(case: tuple[str, int, int]) -> None:
    found = schedules.rows(made(*case))
    assert {rank: " ".join(found[rank]) for rank in ORDERS[case]} == ORDERS[case]


def test_breadth_first_goes_back_the_way_it_came() -> None:
    assert " ".join(schedules.rows(schedules.breadth_first(4, 2))[1]) == "1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0"


# P, M and the makespan for latencies 0, 1 and 2 with F = I = W = 4 per stage, shared among a rank's stages.
LATENCIES = {
    "gpipe": {(4, 8): (132, 138, 144), (8, 16): (276, 290, 304)},
    "eager-1f1b": {(4, 8): (132, 138, 144), (8, 16): (276, 290, 304)},
    "1f1b": {(4, 8): (132, 148, 164), (8, 16): (276, 316, 356)},
    "interleaved": {(4, 8): (114, 128, 142), (8, 16): (234, 264, 294)},
    "looped-bfs": {(4, 8): (114, 120, 126), (8, 16): (234, 248, 262)},
    "zb-h1": {(4, 8): (108, 120, 132), (8, 16): (220, 248, 276)},
    "zb-h2": {(4, 8): (108, 111, 114), (8, 16): (220, 227, 234)},
    "zb-v": {(4, 8): (102, 115, 130), (8, 16): (206, 239, 274)},
    "dualpipe-v": {(4, 8): (102, 118, 136), (8, 16): (206, 246, 288)},
}


@pytest.mark.parametrize("name", LATENCIES)
def test_latency_hurts_tight_schedules(name: str) -> None:
    for (ranks, microbatches), expected in LATENCIES[name].items():
        schedule = made(name, ranks, microbatches)
        work = 4 * ranks / schedule.stages
        found = [schedules.simulate(schedule, Costs(work, work, work, latency=latency)) for latency in (0, 1, 2)]
        assert tuple(timeline.makespan for timeline in found) == expected


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "makespan"),
    [
        ("dualpipe-v", 4, 8, 44),
        ("dualpipe-v", 4, 12, 60),
        ("dualpipe-v", 8, 16, 88),
        ("dualpipe-v", 8, 32, 152),
        ("dualpipe", 4, 8, 22),
        ("dualpipe", 4, 12, 30),
        ("dualpipe", 8, 16, 44),
        ("dualpipe", 8, 32, 76),
    ],
)
def test_overlapped_pairs(name: str, ranks: int, microbatches: int, makespan: int) -> None:
    """A pair takes 2, the time of its backward alone."""
    assert schedules.simulate(made(name, ranks, microbatches), Costs(overlap=1.0)).makespan == makespan


def test_pairs_that_save_nothing_wait_for_both() -> None:
    found = [schedules.simulate(made("dualpipe-v", ranks, 2 * ranks), Costs(overlap=0.0)).bubble for ranks in (2, 4, 8)]
    assert found == [2, 6, 14]
