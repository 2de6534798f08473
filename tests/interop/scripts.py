"""Scripts of torch and their ports, run on processes: by torchrun, or as it does."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

from ..processes import free_port, run_on_processes

ROOT = Path(__file__).parents[2]


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
    """Lines of a run on ranks as a launcher's, which are forked from a process that has imported torch."""
    given = str(script), [*map(str, options)], free_port()
    return "".join(run_on_processes(_printed_by_a_rank, ranks, *given, timeout=240)).splitlines()


def _printed_by_a_rank(rank: int, script: str, options: list[str], port: int) -> str:
    dist.destroy_process_group()  # of this test: the script makes its own
    os.environ["MASTER_PORT"] = str(port)
    sys.argv[:] = [script, *options]
    sys.path.insert(0, str(Path(script).parent))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        runpy.run_path(script, run_name="__main__")
    return said.getvalue()


def changed_lines(original: Path, ported: Path) -> int:
    """Lines that differ, without the docstring and blank lines. A line that replaces another counts once."""
    before, after = (
        [line for line in script.read_text().split('"""', 2)[2].splitlines() if line] for script in (original, ported)
    )
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for code, i1, i2, j1, j2 in codes if code != "equal")
