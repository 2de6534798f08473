"""The command line says what is so, and what to do when its arguments name nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from functional_parallel.cli import main

ROOT = Path(__file__).parent.parent
MESH = ("--mesh", "data=2,tensor=2")


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 0
    return capsys.readouterr().out


def test_it_runs_as_a_module_and_helps_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-m", "functional_parallel", "explain", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert "module:function" in done.stdout


def test_a_module_that_fails_to_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not to be found, and the line that failed nowhere to be seen."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imports_what_is_missing.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "misspells.py").write_text("import torch\ntorch.nowhere_to_be_found\n")
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        main(["explain", "imports_what_is_missing:step", *MESH])
    with pytest.raises(AttributeError, match="nowhere_to_be_found"):
        main(["explain", "misspells:step", *MESH])


def test_doctor_names_backends_and_launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    text = output(capsys, "doctor")
    assert f"torch     {torch.__version__}" in text
    assert "gloo yes" in text and "ranks are simulated" in text
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert "RANK=3 WORLD_SIZE=8" in output(capsys, "doctor")


def test_explain_a_compiled_function(capsys: pytest.CaptureFixture[str]) -> None:
    """On meta tensors: nothing can have been computed."""
    found = json.loads(output(capsys, "explain", "tests.cli_targets:gradient", *MESH, "--json"))
    totals = {(total["kind"], *total["axes"]): total["count"] for total in found["totals"]}
    assert totals == {("psum", "data"): 3, ("psum", "tensor"): 1}
    assert all("cli_targets.py" in row["source"] for row in found["rows"])


def test_explain_a_training_step(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "explain", "tests.cli_targets:training", *MESH, "--group", "axis")
    assert re.search(r"^psum +data +\d+ ×", text, re.MULTILINE)


def test_price(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("price", "tests.cli_targets:gradient", *MESH)
    assert "4 ranks of h100" in output(capsys, *asked)
    assert "cli_targets.py" in output(capsys, *asked, "--group", "line")
    found = json.loads(output(capsys, *asked, "--hardware", "a100", "--json"))
    assert found["hardware"] == "a100" and found["seconds"] > found["exposed"] > 0
    assert main((*asked, "--hardware", "abacus")) == 2
    assert "--hardware abacus: the known ones are h100, a100, v100" in capsys.readouterr().err


def test_explain_passes(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("explain", "tests.cli_targets:training", *MESH, "--group", "pass")
    assert re.search(r"^reductions +\d+", output(capsys, *asked), re.MULTILINE)
    names = [row["name"] for row in json.loads(output(capsys, *asked, "--json"))["rows"]]
    assert names[-1] == "views" and "recompute" in names


def test_explain_prints_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert "psum(" in output(capsys, "explain", "tests.cli_targets:gradient", *MESH, "--program")


def test_memory_counts_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    """Two 4 × 8 matrices of float32, each split in two."""
    lines = output(capsys, "memory", "tests.cli_targets:model", *MESH).splitlines()
    assert lines[0] == "total 128 B per rank on Mesh(data=2, tensor=2)"
    assert lines[1] == "mesh axis 'data' splits nothing: its 2 ranks hold the same"
    assert lines[3] == "w1  [4, 8]  P(None, 'tensor')  64 B"
    assert sum("total" in line for line in lines) == 1


def test_memory_names_rules_that_find_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys, "memory", "tests.cli_targets:misspelt", *MESH).splitlines()
    assert lines[0] == "total 192 B per rank on Mesh(data=2, tensor=2)"
    assert lines[2] == "rules that find no parameter: w_2"


def test_memory_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    """Four of eight layers of 4 × 6 in 16 bytes a parameter, and what is in no stack."""
    found = output(capsys, "memory", "tests.cli_targets:layers", "--mesh", "pipe=2,data=1", "--zero", "1")
    assert "pipeline('pipe', '1f1b', 4)" in found and "16 bytes per parameter" in found
    assert found.splitlines()[0] == "total 1.6 KiB per rank on Mesh(pipe=2, data=1)" and (4 * 4 * 6 + 8) * 16 == 1664
    assert "the rank of 'pipe' that holds most" in found


def test_memory_refuses_a_pipeline_that_no_spec_names(capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes of a rank follow from the cut, which the parameters alone do not show."""
    words = ("memory", "tests.cli_targets:model", "--mesh", "pipe=2,tensor=2")
    for more, message in (
        (("--pipe", "pipe"), "--pipe pipe: no spec of tests.cli_targets:model names the axis"),
        (
            ("--zero", "0", "--axis", "tensor"),
            "which parameters a rank of 'pipe' holds follows from where the model is",
        ),
        (("--pipe", "stage"), "has no axis 'stage'"),
    ):
        assert main((*words, *more)) == 2
        assert message in capsys.readouterr().err
    assert "mesh axis 'pipe' splits nothing: its 2 ranks hold the same" in output(capsys, *words)


def test_memory_counts_what_training_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """64 parameters, split over tensor; gradients and optimizer of ZeRO-2 over data too: 32·2 + 16·2 + 16·12 bytes."""
    lines = output(capsys, "memory", "tests.cli_targets:model", *MESH, "--zero", "2").splitlines()
    assert lines[:2] == [
        "total 288 B per rank on Mesh(data=2, tensor=2)",
        "chain(tensor_parallel('tensor'), zero(2, 'data')), 16 bytes per parameter:",
    ]
    assert [line.split()[1] for line in lines[2:5]] == ["64", "32", "192"] and not lines[5]
    lines = output(capsys, "memory", "tests.cli_targets:model", *MESH, "--zero", "3", "--axis", "tensor").splitlines()
    assert lines[1] == "chain(zero(3, 'tensor')), 16 bytes per parameter:"
    assert lines[0] == "total 512 B per rank on Mesh(data=2, tensor=2)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("explain", "tests.cli_targets", *MESH), "reads module:function"),
        (("explain", "tests/cli_targets:gradient", *MESH), "reads module:function"),
        (("explain", "tests.nowhere:step", *MESH), "not to be found"),
        (("explain", "tests.cli_targets.py:step", *MESH), "a module is named without .py"),
        (("explain", "tests.cli_targets:nothing", *MESH), "not to be found"),
        (("explain", "tests.cli_targets:wrong", *MESH), "shall return a compiled function"),
        (("explain", "tests.cli_targets:RULES", *MESH), "is a dict; it shall be a function that takes the mesh"),
        (("price", "tests.cli_targets:model", *MESH), "returned a pair of dict and dict; it shall return a compiled"),
        (("explain", "tests.cli_targets:pipelined", *MESH), "has no axis 'pipe' for the pipeline"),
        (("explain", "tests.cli_targets:turned_round", *MESH), "mixed_precision"),
        (("memory", "tests.cli_targets:model", "--mesh", "data=2"), "has no axis 'tensor'"),
        (("memory", "tests.cli_targets:model", "--mesh", "data=two"), "data=two"),
        (("memory", "tests.cli_targets:model", *MESH, "--zero", "1", "--axis", "batch"), "has no axis 'batch'"),
    ],
)
def test_arguments_that_name_nothing(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
