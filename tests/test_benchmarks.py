"""The benchmarks' own parts, and (slow) one whole run of the comparison with a peer."""

from __future__ import annotations

import json
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from .processes import run_on_processes

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
ROW = {"name", "config", "ranks", "ours_s", "peer_s", "ratio", "ideal_ratio", "losses_equal"}
ALONE = {
    f"{side}_{key}" for side in ("ours", "peer") for key in ("sent_bytes", "peak_bytes", "tensor_bytes", "start_s")
}


@pytest.fixture(autouse=True)
def scripts_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(BENCHMARKS / "compare.py"), "--json", "--rounds", "2", *arguments]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=500, check=False
    )


@pytest.mark.slow
def test_a_comparison_gives_rows_with_equal_losses_and_the_bytes_of_the_program() -> None:
    done = compare("--sizes", "tiny", "--peers", "DDP", "ZBV")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == ["DDP", "ZBV"]
    for row in rows:
        assert row.keys() >= ROW | ALONE | {"at_once_ratio", "bound_ratio", "floor_ratio", "core_flops", "bandwidth"}
        assert row["losses_equal"] is True
    ddp, zbv = rows
    assert ddp["ours_sent_bytes"] == ddp["ours_program_bytes"] + 8  # in which ranks say what they do
    assert ddp["ours_sent_bytes"] <= ddp["peer_sent_bytes"]
    assert zbv["ours_program_bytes"] / 2 <= zbv["ours_sent_bytes"] < zbv["ours_program_bytes"]  # of two ranks


def test_what_does_not_fit_is_left_out_and_says_why() -> None:
    import compare as script
    from model import SIZES

    assert script.unfit("ZBV", SIZES["wide"], 4) == "2 chunks on each of 4 ranks are 8 stages, and it has 4 layers"
    assert script.unfit("1F1B", SIZES["wide"], 4) is None
    assert script.unfit("ZBV", SIZES["base"], 4) is None
    assert script.unfit("DTensor TP", SIZES["tiny"], 3) == "4 heads do not go into 3 parts"
    assert script.unfit("DDP", SIZES["small"], 3) == "8 samples do not go into 3 parts"


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import optional

    monkeypatch.setattr(optional, "find_spec", lambda name: None)
    assert optional.missing("JAX TP") == "jax is not installed: pip install jax"
    assert str(optional.missing("DeepSpeed ZeRO-1")).endswith("pip install --no-build-isolation deepspeed")
    assert optional.missing("DDP") is None


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")
def test_the_peak_is_of_what_was_alive_since_it_was_reset() -> None:
    from resident import peak, reset_peak, resident

    size = 256 << 20
    reset_peak()
    before = resident()
    with mmap.mmap(-1, size) as block:  # malloc might take it from a hole in its heap, and keep it
        torch.frombuffer(block, dtype=torch.uint8).fill_(1)
        assert abs(peak() - before - size) < size / 8
    assert abs(peak() - before - size) < size / 8
    reset_peak()
    assert abs(peak() - before) < size / 8


def test_the_peak_of_tensors_is_that_of_the_steps_that_count() -> None:
    from tensors import peak_of_tensors

    def begin() -> Callable[[], None]:
        state, _ = torch.zeros(1000, dtype=torch.uint8), torch.zeros(1 << 20)

        def step() -> None:
            nonlocal state
            state = torch.cat([state[:500], state[500:]])

        return step

    kept = torch.zeros(1 << 20)
    assert peak_of_tensors(begin) == 2000
    assert len(kept) == 1 << 20


def test_what_was_given_back_unseen_is_gone_when_another_block_lies_there() -> None:
    from tensors import most_alive

    blocks = [(0.0, 100, 50), (1.0, 200, 10), (2.0, 200, -10), (3.0, 140, 20), (4.0, 90, 15)]
    assert most_alive(blocks, 0.5, 1.5) == 60
    assert most_alive(blocks, 2.5, 3.5) == 50  # before the third block, which lies where the first one ended
    assert most_alive(blocks, 3.5, 9.0) == 35
    assert most_alive(blocks, 5.0, 9.0) == 35


def test_what_rank_0_wrote_counts_however_ranks_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from launch import launched, twice

    script, none = tmp_path / "dies.py", tmp_path / "writes_nothing.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "if os.environ['RANK'] == '0': pathlib.Path(json.loads(sys.argv[1])['out']).write_text('{\"a\": 1}')\n"
        "os._exit(int(os.environ['RANK']))\n"
    )
    none.write_text("import sys\nsys.exit(3)\n")
    assert launched(str(script), {}, 2) == {"a": 1}
    assert "ranks ended with [0, 1]" in capfd.readouterr().err
    assert twice(lambda: launched(str(none), {}, 2), "nothing") is None
    said = capfd.readouterr().err
    assert said.count("ranks ended with [3, 3]") == 2
    assert "nothing failed: see above; trying again" in said
    assert "nothing failed again, and is left out" in said


def test_a_line_in_the_bound_is_the_fastest() -> None:
    import machine

    limits = {"ranks": 4, "lines": {"message": [1e-5, 1e9], "all_reduce, shared": [1e-5, 4e9]}}
    assert machine.bound(limits, single=0.4, sent=2e9) == pytest.approx(0.1 + 0.5)


OF_OTHERS = ["DDP", "ZeroRedundancyOptimizer", "DTensor SP", "1F1B"]


@pytest.mark.parametrize("names", [["FSDP2, resharding"], pytest.param(OF_OTHERS, marks=pytest.mark.slow)])
def test_a_quiet_step_sends_nothing_and_leaves_ours_as_it_was(names: list[str]) -> None:
    for found in run_on_processes(quiet_steps, 2, names):
        for name in names:
            loss, same_loss, sent, quiet_sent, finite = found[name]
            assert loss == same_loss, name
            assert sent > 0, name
            assert quiet_sent == 0, name
            assert finite, name


def quiet_steps(rank: int, names: list[str]) -> dict[str, tuple[float, float, int, int, bool]]:
    """Two losses of ours, in the second with quiet steps between; bytes of ours and of a quiet step; finite values."""
    sys.path.insert(0, str(BENCHMARKS))
    from model import SIZES, batch, make
    from ours import OURS
    from quiet import Quiet
    from traffic import Traffic

    config, found = SIZES["tiny"], {}
    for name in names:
        ours, quietly = (OURS[name](make(config)) for _ in range(2))
        quiet, losses = Quiet(quietly), []
        for index in range(3):
            losses.append(ours.whole(ours.step(batch(config, 0))))
            quiet.step(batch(config, index))
        again = OURS[name](make(config))
        same = [again.whole(again.step(batch(config, 0))) for _ in range(3)]
        ours.leave_to_backend()
        ours.step(batch(config, 0))
        with Traffic() as traffic:
            ours.step(batch(config, 0))
        with Traffic() as silence:
            quiet.step(batch(config, 0))
        finite = all(bool(x.isfinite().all()) for x in tensors_of(quietly.state.handles))
        found[name] = (losses[-1], same[-1], sum(traffic.bytes.values()), sum(silence.bytes.values()), finite)
        assert (quiet.makespan() is None) == (name != "1F1B")
    return found


def tensors_of(handles: Iterable[Any]) -> list[torch.Tensor]:
    return [x for handle in handles for x in getattr(handle, "parts", {0: handle}).values()]


def test_a_pipeline_ends_when_its_last_rank_has_done_all_else() -> None:
    from makespan import ends, ordinary

    from functional_parallel.schedules import Action, Event, one_f_one_b

    schedule = one_f_one_b(2, 3)
    twice = [
        [
            Event(rank, action, 5.0, 5.0 + length)
            for rank, row in enumerate(schedule.actions)
            for action in row
            for length in [{"F": 1.0, "B": 2.0}[action.kind] * (7.0 if slow and action.microbatch == 1 else 1.0)]
        ]
        for slow in (False, True, False)
    ]
    events = ordinary(twice)
    assert {(event.action, event.end) for event in events if event.rank == 1} >= {(Action("F", 1, 1), 1.0)}
    assert (
        ends(schedule, events, [0.5, 0.0]) == 3 * 3 + 3 + 0.5
    )  # rank 0 is the last, after a bubble of one F and one B
    assert ends(schedule, events, [0.0, 4.0]) == 10 + 4


def test_a_table_goes_between_its_marks(tmp_path: Path) -> None:
    import report

    document = tmp_path / "document.md"
    document.write_text("a\n<!-- b -->\nold\n<!-- end b -->\nc\n")
    report.write("b", report.table(["x"], [[1]]), document)
    assert document.read_text() == "a\n<!-- b -->\n| x |\n|---|\n| 1 |\n<!-- end b -->\nc\n"
    with pytest.raises(ValueError, match="has no section <!-- d -->"):
        report.write("d", "", document)


SECTIONS = ["peers", "peers alone", "misses", "machine"]  # of compare.py
OTHERS = ["staged step", "partition time", "equivalence rate", "timeline", "collectives"]
LARGEST = ["largest planned", "largest here"]
GPU = ["gpu tests", "gpu equal", "gpu speed", "gpu kernels", "gpu dropout", "gpu memory"]


@pytest.mark.parametrize("section", [*SECTIONS, *OTHERS, *LARGEST, *GPU])
def test_the_page_has_a_section_for_every_table(section: str) -> None:
    """Each is there once, and holds a table or a sentence."""
    import report

    before, after = report.parts_around(section)
    assert f"<!-- {section} -->" not in before + after
    assert f"<!-- end {section} -->" not in before + after
    assert len(report.DOCUMENT.read_text()) - len(before) - len(after) > 60


def test_the_pages_own_list_of_targets_is_the_scripts() -> None:
    import report
    from targets import IDEAL, target

    text = report.DOCUMENT.read_text()
    rows = {
        name: [cell.strip() for cell in re.findall(rf"^\| {name}(.*)\|$", text, re.MULTILINE)[0].split("|")[1:]]
        for name in ("of the peer's time, tiny", "of the peer's time, larger", "of the ideal, larger")
    }
    columns = ["DDP", "FSDP2, keeping", "ZeroRedundancyOptimizer", "DTensor TP", "DTensor SP", "1F1B"]
    assert rows["of the peer's time, tiny"] == [f"{target(name, 'tiny'):.2f}" for name in columns]
    assert rows["of the peer's time, larger"] == [f"{target(name, 'small'):.2f}" for name in columns]
    assert rows["of the ideal, larger"] == [f"{IDEAL[name]:.2f}" if name in IDEAL else "none" for name in columns]


def test_rows_that_miss_their_target_say_what_stands_against_it() -> None:
    from targets import misses, target

    assert target("DDP", "small") == 0.97
    assert target("DDP", "tiny") == 0.7
    assert target("DTensor TP", "tiny") == 0.3
    assert target("DTensor SP", "tiny") == 0.5
    assert target("JAX DP", "tiny") is None
    row = {
        "name": "DDP",
        "config": "tiny",
        "ranks": 2,
        "ours_s": 0.008,
        "peer_s": 0.01,
        "ratio": 0.8,
        "quiet_s": 0.0068,
    }
    met = {**row, "ours_s": 0.006, "ratio": 0.6}
    above, below = {**row, "floor_s": 0.0071}, {**row, "floor_s": 0.0069}
    assert misses([met, {**row, "name": "JAX DP"}]) == "All 1 rows that have a target meet it."
    text = misses([met, above, below]).splitlines()
    assert text[0] == "1 of the 3 rows that have a target meet it. The others:"
    assert [[cell.strip() for cell in line.split("|")[4:-1]] for line in text[4:]] == [
        ["0.70", "0.80", "7.0", "8.0", "6.8", transfer, word] for transfer, word in (("0.3", "yes"), ("0.1", "no"))
    ]


def test_who_is_beyond_the_ideal_or_holds_more_is_named() -> None:
    from targets import judged

    row = {"name": "DDP", "config": "small", "ranks": 2, "ours_s": 0.5, "peer_s": 1.0, "ratio": 0.5}
    rows = [{**row, "ideal_ratio": 1.05, "tensor_ratio": 1.0}, {**row, "ideal_ratio": 1.06, "tensor_ratio": 1.01}]
    tiny, jax = ({**rows[1], key: value} for key, value in (("config", "tiny"), ("name", "JAX DP")))
    assert judged([rows[0], jax]).splitlines() == [
        "All 1 rows that have a target meet it.",
        "",
        "All 1 rows that have a target against the ideal meet it.",
        "",
        "1 of the 1 rows hold no more tensors than their peer's.",
    ]
    _, _, ideal, _, *table, _, memory = judged([*rows, tiny]).splitlines()
    assert ideal == "1 of the 2 rows that have a target against the ideal meet it. The others:"
    assert [[cell.strip() for cell in line.split("|")[1:8]] for line in table[2:]] == [
        ["DDP", "small", "2", "1.05", "1.06", "495.3", "500.0"]
    ]
    assert memory.startswith("1 of the 3 rows")
    assert memory.endswith("The others: DDP on small with 2 ranks: 1.01; DDP on tiny with 2 ranks: 1.01.")


def test_a_row_is_set_against_a_plain_step_of_one_rank_and_against_those_of_all_at_once() -> None:
    from row import row_of

    times = [[6.0, 6.5], [9.0, 9.5], [10.0, 10.5], [8.0, 8.5], [12.0, 13.0], [5.0, 5.5]]
    settings = {"name": "DDP", "size": "small"}
    row = row_of(settings, 2, times, [[1.0, 1.0]] * 6, [(1.0, 1.0)], 0.0)
    assert (row["single_s"], row["staged_single_s"], row["at_once_s"], row["quiet_s"]) == (10.25, 8.25, 12.5, 5.25)
    assert (row["at_once_ratio"], row["peer_at_once_ratio"]) == (1.0, 1.48)
    assert row["ideal_ratio"] == 12.5 / 10.25
    assert "at_once_s" not in row_of(settings, 2, times[:3], [[1.0, 1.0]] * 3, [(1.0, 1.0)], 0.0)


def test_bytes_of_a_program_of_xla() -> None:
    pytest.importorskip("jax")
    from jax_gpt import bytes_sent

    text = (
        "%a = (f32[128,128]{1,0}, f32[4]{0}) all-reduce(%x, %y), channel_id=1\n"
        "%b = f32[8,2]{1,0} all-gather(%z), channel_id=2\n"
        "%c = f32[8]{0} add(%b, %b)\n"
        "ROOT %d = f32[2]{0} reduce-scatter(%c), channel_id=3\n"
    )
    assert bytes_sent(text, 4) == 1.5 * (128 * 128 + 4) * 4 + 0.75 * 64 + 3 * 8


@pytest.mark.slow
def test_asynchronous_ranks_keep_their_pace_beside_a_slow_one() -> None:
    """Nine tenths of their own steps per second, where synchronous ranks have a fifth."""
    paths = os.pathsep.join([str(BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(BENCHMARKS / "asynchronous.py"), "--json", "--rounds", "3"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "died" not in done.stderr
    ratios = {row["method"]: row["ratio"] for row in json.loads(done.stdout)}
    assert all(ratios[name] > 0.9 for name in ("server", "rotating", "server, inner steps")), ratios
    assert all(ratios[name] < 0.4 for name in ("synchronous", "local SGD", "server, staleness 0")), ratios


def test_the_script_for_a_gpu_runs_toys_on_the_cpu() -> None:
    """Every part but that of tests, with the contestants eager torch and ours."""
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--short", "--part", "equal", "speed", "memory"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    sections = dict(re.findall(r"## (gpu \w+): [^\n]*\n\n(.*?)(?=\n\n## |\Z)", done.stdout, re.DOTALL))
    assert list(sections) == ["gpu equal", "gpu speed", "gpu kernels", "gpu dropout", "gpu memory"]
    cells = {name: [line.strip("|").split("|") for line in text.splitlines()[2:]] for name, text in sections.items()}
    assert [line[1].strip() for line in cells["gpu speed"]] == ["eager torch", "ours"]
    assert all(float(line[2]) > 0 for line in cells["gpu speed"])
    assert abs(float(cells["gpu speed"][0][-1]) - float(cells["gpu speed"][1][-1])) < 0.01  # the losses
    assert all(line[-1].strip() == "yes" for line in cells["gpu equal"])
    assert {line[0].strip() for line in cells["gpu kernels"]} == {"eager torch", "ours"}
    assert cells["gpu memory"][1][1].strip() == "ours"


def test_failures_are_counted_by_cause() -> None:
    from gpu_tests import read

    fails = "".join(
        f'<testcase classname="a" name="t{n}"><failure message="x is {n}.5 at 0x{n}f&#10;rest"/></testcase>'
        for n in (1, 2)
    )
    text = f"""<testsuites><testsuite time="2.5">{fails}<testcase classname="b" name="u"/>
        <testcase classname="b" name="v"><skipped message="no"/></testcase>
        <testcase classname="b" name="w"><error>ImportError: y</error></testcase></testsuite></testsuites>"""
    counts, causes, seconds = read(text)
    assert counts == {"failed": 2, "passed": 1, "skipped": 1, "errors": 1} and seconds == 2.5
    assert causes == [(("x is … at …", "a::t1"), 2), (("ImportError: y", "b::w"), 1)]


def test_contestants_that_take_turns_fit_into_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_speed

    room = type("Properties", (), {"total_memory": 80 << 30})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: room)
    groups = list(gpu_speed._groups(["a", "b", "c", "d"], "cuda"))
    assert groups == [["eager torch", "a", "b", "c"], ["eager torch", "d"]]


def test_a_contestant_that_ends_is_a_row_of_its_own() -> None:
    import gpu_speed

    row = {"workload": "gpt", "name": "x", "failed": True}
    assert "failed" in gpu_speed.speed_table([row]) and gpu_speed.memory_table([row]).count("\n") == 1
    process = gpu_speed.Process("gpt", "no such contestant", "cpu", short=True)
    assert process.answer() is None
    process.end()
