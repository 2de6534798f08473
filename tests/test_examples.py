"""The examples run as users run them, and say what the README says they do."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


IGNORED = "ignore:`torch.jit.script` is deprecated:DeprecationWarning"  # raised inside torch.func.jvp
PYTHON = [sys.executable, "-W", "error", "-W", IGNORED]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The output of an example, run as plain python does from any folder, warnings being errors.

    Each run is a process of its own, forked from one that has imported torch: `preloaded.py`.
    """
    files = [str(tmp_path_factory.mktemp("said") / name) for name in ("out", "err")]
    here = str(tmp_path_factory.mktemp("anywhere"))
    pipe = subprocess.PIPE
    server = subprocess.Popen(
        [*PYTHON, "-m", "tests.preloaded"], stdin=pipe, stdout=pipe, text=True, env=ENVIRONMENT, cwd=ROOT
    )
    assert server.stdin is not None and server.stdout is not None

    def run_one(script: str, *options: str, cwd: Path | None = None) -> str:
        print(json.dumps([str(ROOT / "examples" / script), options, str(cwd or here), *files]), file=server.stdin)
        server.stdin.flush()  # type: ignore[union-attr]
        code = server.stdout.readline()  # type: ignore[union-attr]
        said, error = (Path(file).read_text() for file in files)
        assert code == "0\n", error
        return said

    yield run_one
    server.communicate()


MODULES = {"corpus.py", "gpt.py", "reporting.py", "rlhf.py"}  # the other examples import them


@pytest.mark.slow
@pytest.mark.parametrize("options", [["annotate_mlp.py"], ["ring_allreduce.py", "--ranks", "2", "--sizes", "65536"]])
def test_in_plain_python(options: list[str], tmp_path: Path) -> None:
    """Nothing is imported before, and processes are not forked."""
    command = [*PYTHON, str(ROOT / "examples" / options[0]), *options[1:]]
    subprocess.run(command, timeout=240, env=ENVIRONMENT, cwd=tmp_path, check=True)


@pytest.mark.parametrize("script", sorted({path.name for path in (ROOT / "examples").glob("*.py")} - MODULES))
def test_every_example_has_help(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints the example's docstring, and nothing runs."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", [script, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith(f"usage: {script}")
    first = ast.get_docstring(ast.parse((ROOT / "examples" / script).read_text())) or "no docstring"
    assert first.splitlines()[0][:40] in shown


def test_annotate_mlp(run: Run) -> None:
    assert len((ROOT / "examples" / "annotate_mlp.py").read_text().splitlines()) < 40
    text = run("annotate_mlp.py")
    assert re.search(r"psum +tensor +1 ×", text), "one psum for the row-split matrix"
    assert re.search(r"psum_scatter +data +2 ×", text), "ZeRO-3: one per parameter"
    assert float(re.findall(r"differ by (\S+)", text)[0]) < 1e-6


def test_compose_transforms(run: Run) -> None:
    """It stops with an error where a derivative differs, so all four lines mean all four agree."""
    lines = run("compose_transforms.py").splitlines()
    assert [line.split("  ")[0] for line in lines] == ["grad", "per-sample gradients", "jvp", "hessian"]
    assert all("psum over data" not in line for line in lines if line.startswith("per-sample")), "samples do not meet"


def test_decode_with_cache(run: Run) -> None:
    text = run("decode_with_cache.py")
    assert re.search(r"^psum +tensor +1 ×", text, re.MULTILINE), "the heads meet once"
    assert "key: (4, 6, 4, 4) float32, P('data', None, 'tensor')" in text, "the cache stays on the ranks"
    assert float(re.findall(r"differ by (\S+)", text)[0]) < 1e-5


def test_generate(run: Run) -> None:
    short = ["--steps", "2", "--embed", "16", "--length", "3"]
    text = run("generate.py", "--mesh", "data=2,pipe=2", *short)
    assert len(re.findall(r"^'", text, re.MULTILINE)) == 4, "a line for each prompt"
    assert float(re.findall(r"differ by (\S+)", text)[0]) < 1e-4


def test_train_gpt(run: Run, tmp_path: Path) -> None:
    """A few steps on a small model: a plot, a sample, a summary; `test_main_job.py` compares losses."""
    size = ["--steps", "3", "--layers", "1", "--embed", "16", "--heads", "2", "--time", "32", "--batch", "8"]
    short = [*size, "--sample", "8", "--evaluations", "1"]
    text = run("train_gpt.py", "--mesh", "pipe=2,data=2", *short, cwd=tmp_path)
    assert "held-out loss" in text and "sample: def " in text
    assert 5 < float(re.findall(r"last loss (\S+)", text)[0]) < 6
    assert (tmp_path / "runs" / "loss.png").exists()


def test_train_gpt_goes_on_from_what_it_saved(run: Run, tmp_path: Path) -> None:
    """On another mesh, and in another precision, whose optimizer state has a loss scale beside it."""
    size = ["--layers", "1", "--embed", "16", "--heads", "2", "--time", "32", "--batch", "8", "--plot", "loss.png"]
    short = [*size, "--sample", "8", "--evaluations", "1"]
    saved = run(
        "train_gpt.py", "--mesh", "data=2", "--zero", "3", "--steps", "2", "--save", "kept", *short, cwd=tmp_path
    )
    assert "saved step 2 to kept" in saved
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == [".lock", "step_00000002"]
    on = ["--steps", "3", "--resume", "kept", *short]
    texts = [
        run("train_gpt.py", *options, *on, cwd=tmp_path)
        for options in (["--mesh", "data=1"], ["--mesh", "tensor=2", "--precision", "fp16"])
    ]
    last = [float(re.findall(r"1 steps in .*, last loss (\S+)", text)[0]) for text in texts]
    assert abs(last[0] - last[1]) < 1e-2
    with pytest.raises(AssertionError, match="kept holds a model of --layers 1: resume with the same"):
        run("train_gpt.py", "--mesh", "data=1", *on, "--layers", "2", cwd=tmp_path)


def test_offload(run: Run) -> None:
    text = run("offload.py", "--layers", "4", "--width", "128", "--steps", "1")
    assert "ZeRO-2, state on the host: fits" in text and "above the budget" in text


def test_zero_stages(run: Run, tmp_path: Path) -> None:
    """Stage by stage less is kept; 2Ψ(n−1)/n is sent, and 3Ψ(n−1)/n at stage 3; the loss is the same."""
    text = run("zero_stages.py", "--plot", str(tmp_path / "zero.png"))
    assert text.count("a third of it") == 11
    rows = [line.split() for line in text.splitlines() if re.match(r" +[0-3]  ", line)]
    together, sent, losses = ([float(row[column]) for row in rows] for column in (4, 5, 6))
    assert together == sorted(together, reverse=True) == [2048.0, 1280.0, 896.0, 512.0]
    assert sent[:3] == [768.0] * 3 and 1080 < sent[3] <= 1152  # the first layer is not needed again
    assert len(set(losses)) == 1
    assert (tmp_path / "zero.png").exists()


def test_pipeline_schedules(run: Run, tmp_path: Path) -> None:
    text = run("pipeline_schedules.py", "--ranks", "4", "--microbatches", "8")
    rows = {line.split()[0]: line.split() for line in text.split("forwards held per rank")[1].splitlines() if line}
    assert rows["1f1b"][1:4] == ["33", "9", "27.3%"], "(P - 1)(F + B) of (M + P - 1)(F + B)"
    assert rows["zb-h1"][2] == "3", "a third of 1F1B's"
    assert "zb-h2" in rows
    small = ["--ranks", "2", "--microbatches", "3", "--only", "1f1b", "zb-h1"]  # matplotlib takes long
    run("pipeline_schedules.py", *small, "--plot", "all.png", cwd=tmp_path)
    assert (tmp_path / "all.png").stat().st_size > 10_000


def test_asynchronous(run: Run, tmp_path: Path) -> None:
    """At one worker all methods with the same updates are one; with more the rotating server is behind."""
    small = ["--workers", "1", "4", "--gradients", "64", "--inner", "4"]
    text = run("asynchronous.py", *small, "--save", "pictures/workers.png", cwd=tmp_path)
    rows = {
        name: (float(one), float(four)) for name, one, four in re.findall(r"^(\S.*?)  +(\S+) +(\S+) +\d+$", text, re.M)
    }
    assert len(rows) == 5
    assert len({one for name, (one, _) in rows.items() if name != "DiLoCo"}) == 1
    assert rows["rotating server"][1] > rows["synchronous (staleness 0)"][1] > rows["rotating server"][0]
    assert "convergence suffers" in text
    assert (tmp_path / "pictures" / "workers.png").stat().st_size > 10_000


def test_ring_allreduce(run: Run, tmp_path: Path) -> None:
    """Bytes as the textbook has them, and no time that the network cards forbid; the sums are checked inside."""
    options = ["--ranks", "2", "3", "4", "--sizes", "65536", "262144", "--plot", str(tmp_path / "ring.png")]
    text = run("ring_allreduce.py", *options)
    rows = re.findall(r"(one server|ring|halving) +(\d) +(\d+) +(\d) +([\d.]+) φ +[\d.]+ +(.+); +(.+)", text)
    assert len(rows) == 2 * (3 + 2 + 3), "three ranks are no power of two, which halving needs"
    for name, ranks, kib, rounds, busiest, *by_rank in rows:
        p, (times, moved) = int(ranks), ([float(each) for each in values.split()] for values in by_rank)
        assert int(rounds) == {"one server": 2, "ring": 2 * (p - 1), "halving": 2 * (p.bit_length() - 1)}[name]
        assert float(busiest) == round(2 * (p - 1) / (1 if name == "one server" else p), 2)
        assert len(moved) == len(times) == p
        assert abs(max(moved) - float(busiest) * int(kib) / 1024) < 0.01
        assert moved[1:] == ([2 * int(kib) / 1024] * (p - 1) if name == "one server" else moved[:1] * (p - 1))
        assert all(time >= 0.99 * mib * 2**20 / 125e6 * 1000 for time, mib in zip(times, moved, strict=True))
    assert re.search(r"4 ranks, 0.25 MiB: the ring is [\d.]+ × as fast; predicted [\d.]+ ×", text)
    assert (tmp_path / "ring.png").exists()
