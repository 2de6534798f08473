"""The simulator obeys what it promises, and its drawings show the same numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functional_parallel import schedules
from functional_parallel.errors import ScheduleError
from functional_parallel.schedules import Costs, Schedule

from .cases import drawn, made

ROOT = Path(__file__).parent.parent.parent
COSTS = st.builds(
    Costs,
    forward=st.integers(1, 9),
    input_gradient=st.integers(1, 9),
    weight_gradient=st.integers(1, 9),
    latency=st.integers(0, 5),
    message=st.integers(0, 5),
    bandwidth=st.integers(1, 3),
    overlap=st.sampled_from([None, 0.0, 0.5, 1.0]),
    jitter=st.sampled_from([0.0, 0.3]),
)


@given(drawn(), COSTS)
def test_every_action_runs_when_it_can(schedule: Schedule, costs: Costs) -> None:
    """One thing at a time per rank unless paired, nothing before what it uses has arrived, and nothing late."""
    timeline = schedules.simulate(schedule, costs)
    times = {event.action: event for row in timeline.events for event in row}
    assert len(times) == sum(map(len, schedule.actions))
    kinds = {(action.stage, action.microbatch): action.kind for action in schedule if action.kind in "BI"}
    for row in timeline.events:
        free = 0.0
        for position, event in enumerate(row):
            together = costs.overlap is not None and position and row[position - 1].action in schedule.pairs
            if together:
                assert event[2:] == row[position - 1][2:]
                continue
            paired = costs.overlap is not None and event.action in schedule.pairs
            group = [event.action, row[position + 1].action] if paired else [event.action]
            lower = [free]
            for kind, stage, m in group:
                needed = [(("F", stage, m) if kind in "BI" else ("I", stage, m))] if kind != "F" else []
                if kind == "F" and schedule.before(stage) is not None:
                    needed.append(("F", stage - 1, m))
                if kind in "BI" and schedule.after(stage) is not None:
                    needed.append((kinds[stage + 1, m], stage + 1, m))
                for other in needed:
                    there = times[schedules.Action(*other)]
                    away = costs.latency + costs.message / costs.bandwidth if there.rank != event.rank else 0
                    lower.append(there.end + away)
            # Messages queue up on their way, so with a size an action may start later than the bound.
            assert event.start >= max(lower) - 1e-9
            if not costs.message:
                assert event.start == pytest.approx(max(lower), abs=1e-9)
            free = event.end


@given(drawn(), COSTS)
def test_work_is_kept(schedule: Schedule, costs: Costs) -> None:
    """Every rank is busy for the sum of its actions' times, whatever the order."""
    plain = Costs(costs.forward, costs.input_gradient, costs.weight_gradient, costs.latency)
    timeline = schedules.simulate(schedule, plain)
    assert timeline.busy == tuple(sum(map(plain.time, row)) for row in schedule.actions)
    assert timeline.makespan >= max(timeline.busy)
    assert 0 <= timeline.span_bubble <= timeline.bubble


def test_costs_per_stage() -> None:
    """The slowest stage paces the pipeline: 8 times 2 + 4 on rank 1, and one forward before and backward after."""
    costs = Costs(forward=[1, 2], input_gradient=[1, 2], weight_gradient=[1, 2])
    timeline = schedules.simulate(schedules.gpipe(2, 8), costs)
    assert timeline.makespan == 1 + 8 * 6 + 2
    assert timeline.bubble_fraction == pytest.approx(1 - (24 + 48) / (2 * 51))
    with pytest.raises(ScheduleError, match="`forward` has 3 values, but gpipe has 2 stages"):
        schedules.simulate(schedules.gpipe(2, 8), Costs(forward=[1, 1, 1]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"forward": -1}, r"Costs\(forward=-1\): .* it is 0 or more"),
        ({"weight_gradient": [1, float("nan")]}, "weight_gradient=nan"),
        ({"latency": float("inf")}, "latency=inf"),
        ({"bandwidth": 0}, "bandwidth=0.*more than 0"),
        ({"overlap": 1.5}, "overlap=1.5.*from 0 to 1"),
        ({"jitter": 2}, "jitter=2.*from 0 to 1"),
        ({"forward": "slow"}, "forward='slow'.*0 or more"),
        ({"message": ["1", "2"]}, "message='1'.*0 or more"),
        ({"jitter": "0.1"}, "jitter='0.1'.*from 0 to 1"),
        ({"bandwidth": None}, "bandwidth=None.*more than 0"),
    ],
)
def test_costs_that_make_no_sense(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Costs(**wrong)


def test_messages_share_a_way() -> None:
    """Four forwards of 1 send messages that take 3 each: the last arrives at 1 + 4 · 3 + 10."""
    timeline = schedules.simulate(schedules.gpipe(2, 4), Costs(message=6, bandwidth=2, latency=10))
    assert [event.start for event in timeline.events[1][:4]] == [14, 17, 20, 23]


def test_jitter_has_a_seed() -> None:
    def makespan(seed: int) -> float:
        return schedules.simulate(schedules.one_f_one_b(4, 8), Costs(jitter=0.2, seed=seed)).makespan

    assert makespan(3) == makespan(3) != makespan(4)
    assert 0.8 * 33 <= makespan(3) <= 1.2 * 33


def test_an_input_gradient_may_release_a_part() -> None:
    schedule = schedules.zb_h2(4, 8)
    found = [schedules.simulate(schedule, Costs(activation=2.0, kept_by_weight_gradient=k)).peaks for k in (1, 0.5, 0)]
    assert found[0] == (14.0,) * 4
    assert found[2] == (14.0, 10.0, 6.0, 2.0)
    assert found[1] == (14.0, 12.0, 10.0, 8.0)


# -----------------------------------------------------------------------------
# Drawings
# -----------------------------------------------------------------------------


def test_text_has_a_column_per_unit() -> None:
    text = schedules.timeline_text(schedules.simulate(schedules.zb_h1(2, 2), Costs(0.5, 0.5, 1.5)))
    assert text.split("\n") == [
        "rank 0  F0  F1  .   I0  W0  --  --  I1  W1  --  --",
        "rank 1  .   F0  I0  F1  I1  W0  --  --  W1  --  --",
    ]


@given(drawn(), COSTS)
def test_text_shows_every_rank_over_the_same_time(schedule: Schedule, costs: Costs) -> None:
    lines = schedules.timeline_text(schedules.simulate(schedule, costs)).split("\n")
    assert len(lines) == schedule.ranks
    assert len({len(line.split()) for line in lines}) == 1
    assert max(map(len, lines)) < 3000


def test_nothing_takes_time(tmp_path: Path) -> None:
    timeline = schedules.simulate(schedules.gpipe(2, 2), Costs(0, 0, 0))
    assert schedules.timeline_text(timeline) == "rank 0\nrank 1"
    assert schedules.summary(timeline).split("\n")[1] == "bubble       0, 0.0 % of all ranks' time"
    schedules.plot(timeline, tmp_path / "picture.png")


def test_long_timelines_are_scaled() -> None:
    text = schedules.timeline_text(schedules.simulate(schedules.gpipe(2, 3), Costs(forward=1.2345678)))
    assert len(text.split("\n")[0].split()) == 202


def test_chrome_trace() -> None:
    timeline = schedules.simulate(schedules.zb_v(4, 3), Costs(latency=1))
    events = json.loads(schedules.chrome_trace(timeline, microseconds=10))["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 1"]
    drawn = [(event["pid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert drawn == [
        (rank, str(action), 10 * start, 10 * (end - start))
        for row in timeline.events
        for rank, action, start, end in row
    ]


def test_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    for name in ("1f1b", "dualpipe-v"):
        file = tmp_path / f"{name}.png"
        schedules.plot(schedules.simulate(made(name, 2, 4), Costs(overlap=0.5)), file)
        pixels = image.imread(file)
        colors = {tuple((255 * pixel[:3]).round().astype(int)) for line in pixels[::3] for pixel in line[::3]}
        assert (0x4C, 0x78, 0xA8) in colors and (0x59, 0xA1, 0x4F) in colors


def test_nothing_of_it_needs_torch() -> None:
    """The folder alone, below packages that are empty, in an interpreter in which importing torch fails."""
    code = (
        "import sys, types; sys.modules['torch'] = None; names = 'functional_parallel', 'sharding_specs'; "
        "sys.modules.update({name: types.ModuleType(name) for name in names}); "
        "[setattr(sys.modules[name], '__path__', [name]) for name in names]; "
        "from functional_parallel import schedules; "
        "print(schedules.simulate(schedules.check(schedules.get('1f1b')(4, 8))).makespan)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("33.0\n", "")
