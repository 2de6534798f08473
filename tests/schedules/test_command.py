"""The command prints, draws and exports a schedule, and refuses what no rule makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from functional_parallel import schedules
from functional_parallel.cli import main


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(("schedule", *words)) == 0
    return capsys.readouterr().out


def test_it_prints_the_timeline(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "1f1b", "--stages", "2", "--microbatches", "3").split("\n")
    assert lines[:4] == [
        "1f1b: 2 stages on 2 ranks, 3 microbatches",
        "",
        "rank 0  F0  F1  .   .   B0  --  F2  B1  --  .   B2  --",
        "rank 1  .   F0  B0  --  F1  B1  --  F2  B2  --  .   .",
    ]
    assert lines[5:9] == [
        "makespan     12",
        "bubble       3, 25.0 % of all ranks' time",
        "span bubble  3",
        "peak         2 1",
    ]


def test_ranks_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--name", "dualpipe-v", "--ranks", "2", "--microbatches", "4", "--json")
    found = json.loads(output(capsys, *words))
    assert found["ranks"] == schedules.rows(schedules.dualpipe_v(4, 4))
    assert "(0F3;3B1)" in found["ranks"][0]
    assert {key: found[key] for key in found if key != "ranks"} == {
        "makespan": 25,
        "bubble": 1,
        "span_bubble": 1,
        "peak": [5, 5],
    }


def test_costs(capsys: pytest.CaptureFixture[str]) -> None:
    costs = ("--forward", "4", "--input-grad", "4", "--weight-grad", "4", "--latency", "2", "--json")
    found = json.loads(output(capsys, "zb-h1", "--ranks", "4", "--microbatches", "8", *costs))
    assert found["makespan"] == 132
    found = json.loads(output(capsys, "interleaved", "--ranks", "2", "--chunks", "4", "--microbatches", "4", "--json"))
    assert (found["makespan"], found["peak"]) == (51, [9, 7])


def test_the_search_is_under_the_costs_and_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    """With dear input gradients and messages another order is best than with equal times."""
    words = ("--name", "zb-auto", "--ranks", "4", "--microbatches", "8", "--limit", "8", "--latency", "2", "--json")
    costs = schedules.Costs(10, 11, 7, 2)
    priced = ("--forward", "10", "--input-grad", "11", "--weight-grad", "7")
    found = json.loads(output(capsys, *words, *priced))
    wanted = schedules.zb_auto(4, 8, 8, costs)
    assert found["ranks"] == schedules.rows(wanted) != schedules.rows(schedules.zb_auto(4, 8, 8))
    assert found["span_bubble"] == schedules.simulate(wanted, costs).span_bubble
    assert max(found["peak"]) <= 8


SCRIPTS = "naive gpipe 1f1b eager-1f1b interleaved looped-bfs zb-h1 zb-h2 zb-v v-half v-min zb-auto dualpipe dualpipe-v"


@pytest.mark.parametrize("name", SCRIPTS.split())
def test_every_name_with_every_option(capsys: pytest.CaptureFixture[str], name: str) -> None:
    words = ("--name", name, "--ranks", "2", "--microbatches", "4", "--chunks", "3", "--forward", "1", "--input-grad")
    found = json.loads(output(capsys, *words, "1", "--weight-grad", "1", "--latency", "0", "--json"))
    schedule = schedules.for_ranks(name, 2, 4, chunks=3)
    timeline = schedules.simulate(schedule)
    assert schedule.name == name
    assert list(found) == ["ranks", "makespan", "bubble", "span_bubble", "peak"]
    assert found["ranks"] == schedules.rows(schedule)
    assert found["bubble"] == found["makespan"] - min(timeline.busy)
    assert found["peak"] == list(schedules.peaks(schedule))


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "trace.json", tmp_path / "picture.png"
    words = ("zb-v", "--stages", "4", "--microbatches", "4", "--csv")
    text = output(capsys, *words, "--trace", str(trace), "--plot", str(picture))
    assert schedules.from_csv(text).actions == schedules.zb_v(4, 4).actions
    assert len([event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]) == 48
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dualpipe", "--ranks", "3", "--microbatches", "8"), "an even number of stages; got stages=3"),
        (("nothing", "--ranks", "3", "--microbatches", "8"), "there is no schedule 'nothing'; there are naive, gpipe"),
        (("--ranks", "3", "--microbatches", "8"), "no schedule is named; there are naive, gpipe"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--forward", "-1"), "Costs(forward=-1.0)"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--latency", "nan"), "Costs(latency=nan)"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--limit", "2"), "--limit applies to zb-auto only"),
        (("zb-auto", "--ranks", "2", "--microbatches", "2", "--limit", "0"), "got limit=0"),
        (("1f1b", "--name", "gpipe", "--ranks", "2", "--microbatches", "2"), "1f1b and --name gpipe are two schedules"),
        (
            ("1f1b", "--ranks", "2", "--microbatches", "2", "--trace", "/nowhere/t.json"),
            "--trace /nowhere/t.json: No such",
        ),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--plot", "/nowhere/p.png"), "--plot /nowhere/p.png: No such"),
        (("1f1b", "--ranks", "2", "--microbatches", "2", "--plot", "p.nothing"), "'nothing' is not supported"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert main(("schedule", *words)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("microbatches", [8, 400])
def test_the_bars_of_many_microbatches_are_seen(tmp_path: Path, microbatches: int) -> None:
    """Their white edges leave most of each: of the pixels of a row two thirds have a color."""
    image = pytest.importorskip("matplotlib.image")
    schedules.plot(schedules.simulate(schedules.gpipe(2, microbatches), schedules.Costs()), tmp_path / "picture.png")
    pixels = image.imread(tmp_path / "picture.png")[..., :3]
    rows = (pixels.max(-1) - pixels.min(-1) > 0.1).mean(1)
    assert rows.max() > 2 / 3
