"""The tests that need a GPU, and those that start processes, on it: counts, and failures by cause."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import report

PROJECT = Path(__file__).parent.parent
RUNS = {"tests/cuda": ["tests/cuda"], "--device cuda": ["--device", "cuda"]}
HEAD = ("tests", "passed", "failed", "errors", "skipped", "seconds", "ended")
_OUTCOMES = {"failure": "failed", "error": "errors", "skipped": "skipped"}


def tests_table(short: bool, seconds: float = 150.0) -> str:
    """Run the tests, each list for at most `seconds`, and return the tables of counts and of causes."""
    rows, causes = [], []
    for name, arguments in list(RUNS.items())[: 1 if short else None]:
        counts, found, taken, ended = run(arguments, seconds)
        rows.append((name, *(counts[kind] for kind in HEAD[1:5]), f"{taken:.0f}", "yes" if ended else "no"))
        causes += [(name, count, cause, example) for (cause, example), count in found]
    tables = [report.table(HEAD, rows)]
    return "\n\n".join(
        [*tables, report.table(("tests", "failures", "cause", "one of them"), causes)] if causes else tables
    )


def run(
    arguments: Sequence[str], seconds: float
) -> tuple[Counter[str], list[tuple[tuple[str, str], int]], float, bool]:
    """Return the counts of outcomes, the failures by cause, the seconds, and whether all tests ended in time."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "junit.xml"
        workers = str(max(1, (os.cpu_count() or 2) - 2))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            workers,
            "-p",
            "no:cacheprovider",
            "--junitxml",
            str(out),
        ]
        paths = os.pathsep.join([str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [*command, *arguments], cwd=PROJECT, stdout=sys.stderr, env={**os.environ, "PYTHONPATH": paths}
        )
        ended = True
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            ended = False
            process.send_signal(signal.SIGINT)  # pytest writes what it has
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not out.exists():
            return Counter(), [], seconds, False
        return (*read(out.read_text()), ended)


def read(text: str) -> tuple[Counter[str], list[tuple[tuple[str, str], int]], float]:
    """Return counts of outcomes, failures by cause, and seconds from a JUnit file."""
    counts, causes, examples, seconds = Counter[str](), Counter[str](), dict[str, str](), 0.0
    for suite in ElementTree.fromstring(text).iter("testsuite"):
        seconds += float(suite.get("time", 0))
        for case in suite.iter("testcase"):
            wrong = [child for child in case if child.tag in _OUTCOMES]
            counts[_OUTCOMES[wrong[0].tag] if wrong else "passed"] += 1
            for child in wrong:
                if child.tag != "skipped":
                    cause = cause_of(child.get("message") or child.text or "")
                    causes[cause] += 1
                    examples.setdefault(cause, f"{case.get('classname')}::{case.get('name')}")
    found = [((cause, examples[cause]), count) for cause, count in causes.most_common(12)]
    return counts, found, seconds


def cause_of(message: str) -> str:
    """Return the first line of an error, without the numbers that differ between tests."""
    first = message.strip().splitlines()[0] if message.strip() else "no message"
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?", "…", first)[:120].replace("|", "/")
