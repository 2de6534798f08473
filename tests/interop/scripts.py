"""Scripts of torch and their ports, run by torchrun on processes."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_AT_THE_END = "terminate called without an active exception"  # of threads of torch's DDP, once in some ten runs
_ATTEMPTS = 5


def started(script: Path, *options: object, ranks: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, str(script), *map(str, options)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def printed(script: Path, *options: object, ranks: int = 2) -> list[str]:
    """Lines of a run. A script of torch's DDP alone is run again if torch ends it by SIGABRT when it is through."""
    attempts = _ATTEMPTS if "functional_parallel" not in script.read_text() else 1
    for attempt in range(attempts):
        running = started(script, *options, ranks=ranks)
        said, error = running.communicate(timeout=240)
        if running.returncode == 0 or _AT_THE_END not in error or attempt == attempts - 1:
            break
    assert running.returncode == 0, error
    return said.splitlines()


def changed_lines(original: Path, ported: Path) -> int:
    """Lines that differ, without the docstring and blank lines. A line that replaces another counts once."""
    before, after = (
        [line for line in script.read_text().split('"""', 2)[2].splitlines() if line] for script in (original, ported)
    )
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for code, i1, i2, j1, j2 in codes if code != "equal")
