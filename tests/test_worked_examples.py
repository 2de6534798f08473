"""The diffs of docs/worked_examples.md apply to the sources, and the lines after each of them hold on the result.

All diffs are applied to one copy of the sources. One process runs the lines and the new tests. The page marks its lines
as `py`, because the blocks that it marks as `python` run on sources without the diffs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "worked_examples.md"
EXAMPLE = re.compile(r"^## (.+?)$.*?^```diff\n(.*?)^```$.*?^```py\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES: list[tuple[str, str, str]] = EXAMPLE.findall(PAGE.read_text())  # title, diff and lines that use the change
SEAMS = (  # each is one new file, beside its test, and few lines in at most two others
    "A pass on residuals",
    "A wire format",
    "A transport of collectives",
    "A placement at rest",
    "A transform outside the library",
)
FILE = re.compile(r"^--- (\S+)\n\+\+\+ b/(\S+)\n(.*?)(?=^--- |\Z)", re.MULTILINE | re.DOTALL)
NEW_TEST = re.compile(r"^--- /dev/null\n\+\+\+ b/(tests/\S+)\.py$", re.MULTILINE)

RUN_TESTS = """
import importlib
import sys

for name in sys.argv[1:]:
    tests = [each for key, each in vars(importlib.import_module(name)).items() if key.startswith("test_")]
    assert tests, name
    for test in tests:
        test()
"""


def test_every_section_is_an_example_that_contributing_links_to() -> None:
    titles = [title for title, _, _ in EXAMPLES]
    assert titles == re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE) and len(titles) == 8
    links = re.findall(r"\(docs/worked_examples\.md#(\S+)\)", (ROOT / "CONTRIBUTING.md").read_text())
    assert links == [title.lower().replace(" ", "-") for title in titles]


@pytest.mark.parametrize("title", SEAMS)
def test_a_seam_costs_one_file(title: str) -> None:
    (diff,) = (diff for each, diff, _ in EXAMPLES if each == title)
    files = [file for file in FILE.findall(diff) if not file[1].startswith("tests/")]
    sizes = {name: len(re.findall(r"^[+-]", text, re.MULTILINE)) for _, name, text in files}
    new = [name for old, name, _ in files if old == "/dev/null"]
    assert len(new) == 1 and sizes.pop(new[0]) <= 60
    assert len(sizes) <= 2 and all(0 < size <= 2 for size in sizes.values()), sizes


@pytest.mark.skipif(shutil.which("git") is None, reason="git apply reads the diffs")
def test_the_examples_apply_and_work(tmp_path: Path) -> None:
    for package in ("functional_parallel", "sharding_specs", "tests"):
        shutil.copytree(ROOT / package, tmp_path / package)
    for title, diff, _ in EXAMPLES:
        apply(title, diff, tmp_path)
    script = tmp_path / "examples.py"
    script.write_text("\n".join(lines for _, _, lines in EXAMPLES) + RUN_TESTS)
    new_tests = [path.replace("/", ".") for _, diff, _ in EXAMPLES for path in NEW_TEST.findall(diff)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script), *new_tests],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"the diffs apply, but an example fails:\n{done.stderr}"


def apply(title: str, diff: str, folder: Path) -> None:
    """Apply a diff to a copy of the sources, as in a folder that belongs to no repository."""
    done = subprocess.run(
        ["git", "apply", "-"],
        input=diff,
        cwd=folder,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, (
        f"docs/worked_examples.md, {title!r}: the diff does not apply to the present sources. Make the change in a "
        f"copy of them, and replace the block by its `git diff -U1`:\n{done.stderr}"
    )
