"""README's commands are the ones that CI runs, and the tables of features name tests that exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
FEATURES = (ROOT / "docs" / "what_works.md").read_text()


def test_ci_finds_the_command_that_runs_the_tests() -> None:
    pattern = re.search(r"grep -m 1 -E '([^']+)'", (ROOT / ".ci" / "run").read_text())
    assert pattern is not None
    found = subprocess.run(["grep", "-E", pattern[1], str(ROOT / "README.md")], capture_output=True, text=True)
    assert found.stdout.strip().endswith("-m pytest -n auto")
    assert found.stdout.count("\n") == 1


def test_both_commands_pin_torch() -> None:
    commands = re.findall(r"^python -m venv .*$", README, re.MULTILINE)
    assert len(commands) == 2
    assert all("torch==2.13.0" in command for command in commands)


@pytest.mark.parametrize("path", sorted(set(re.findall(r"`(tests/[\w/.]+)`", README + FEATURES))))
def test_what_is_said_to_work_has_a_test(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("folder", ["functional_parallel", "sharding_specs", "examples", "docs", "tests", "benchmarks"])
def test_files_stay_small(folder: str) -> None:
    long = [str(path) for path in (ROOT / folder).rglob("*.py") if len(path.read_text().splitlines()) > 450]
    assert not long, "files of one concept, rarely over 400 lines"
