"""Starts the ranks of a measurement as processes of their own, and reads what they found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Ranks", "launched", "twice"]

_PATIENCE = 20.0
_LONGEST = 3600.0


class Ranks:
    """Processes that run a script beside this one, one per rank, with one thread each.

    Args:
        script: its file name or whole path; it is given `settings` as JSON, with a file for its result under "out".
        settings: what it is to measure.
        ranks: how many processes.
        environment: variables beside those that torch.distributed reads.
        pipes: whether to hold a pipe to and from each.
        prefixes: the words before the command of each, such as those that run it on another host.
    """

    def __init__(
        self,
        script: str,
        settings: dict[str, Any],
        ranks: int,
        environment: dict[str, str],
        pipes: bool = False,
        prefixes: Sequence[Sequence[str]] = (),
    ) -> None:
        self._script = script
        self._folder = tempfile.TemporaryDirectory()
        self.out = Path(self._folder.name) / "found.json"
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # ninja, for DeepSpeed
        everywhere = {**os.environ, **shared, "PATH": tools, "OMP_NUM_THREADS": "1", **environment}
        command = [
            sys.executable,
            str(Path(__file__).parent / script),
            json.dumps({**settings, "out": str(self.out)}),
        ]
        ends: dict[str, Any] = {"stdout": sys.stderr}  # stdout is for the rows
        if pipes:
            ends = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [
            subprocess.Popen(
                [*prefix, *command], env={**everywhere, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **ends
            )
            for rank, prefix in enumerate(prefixes or [()] * ranks)
        ]

    def found(self) -> dict[str, Any] | None:
        """Wait for all; what rank 0 wrote, or None when a rank failed, which has said why.

        All end at once, after a barrier. Who has not ended long after the first is killed: a rank whose peer failed, or
        one that gloo does not let go. Rank 0 writes when all ranks are done, so what it wrote counts however they end:
        one that is still in the last barrier when another has gone may find its connection closed.
        """
        last = time.monotonic() + _LONGEST
        while None in (codes := [process.poll() for process in self.processes]) and time.monotonic() < last:
            if codes.count(None) < len(codes):
                last = min(last, time.monotonic() + _PATIENCE)
            time.sleep(0.02)
        for process in self.processes:
            process.kill()
            process.wait()
        found = json.loads(self.out.read_text()) if self.out.exists() else None
        if any(codes) or None in codes:
            print(f"{self._script}: ranks ended with {codes}, where None had to be killed", file=sys.stderr)
        self._folder.cleanup()
        return found


def twice(run: Callable[[], Any], what: str) -> Any:
    """What a run found, or None when it failed; it is tried again once."""
    found = run()
    if found is None:
        print(f"{what} failed: see above; trying again", file=sys.stderr)
        found = run()
        if found is None:
            print(f"{what} failed again, and is left out", file=sys.stderr)
    return found


def launched(script: str, settings: dict[str, Any], ranks: int, environment: dict[str, str] | None = None) -> Any:
    """Run a script on all ranks and return what rank 0 wrote; None when a rank failed."""
    return Ranks(script, settings, ranks, environment or {}).found()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
