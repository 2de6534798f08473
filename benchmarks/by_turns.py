"""Ours against a peer that runs in processes of its own: both are told when to step, never two at once."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from launch import Ranks
from resident import THRESHOLD
from row import CHECKED_STEPS, row_of, turns_of

__all__ = ["alone_by_turns", "by_turns"]


class Told:
    """Some processes that take the same commands."""

    def __init__(self, settings: dict[str, Any], ranks: int, environment: dict[str, str]) -> None:
        self.ranks = Ranks("turns.py", settings, ranks, environment, pipes=True)

    def __call__(self, command: str, index: int) -> list[dict[str, Any]]:
        """Tell all, and wait for all answers.

        Raises:
            ChildProcessError: when one ended instead.
        """
        for process in self.ranks.processes:
            process.stdin.write(json.dumps([command, index]) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self.ranks.processes]
        if not all(answers):
            raise ChildProcessError(f"a process ended before it answered to {command!r}")
        return [json.loads(answer) for answer in answers]

    def end(self) -> None:
        for process in self.ranks.processes:
            process.stdin.close()
        self.ranks.found()


def by_turns(settings: dict[str, Any], ranks: int) -> dict[str, Any] | None:
    """A row, as `worker.py` makes it for peers that share its processes; None when a process failed."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder) / f"{side}.npz") for side in ("ours", "jax")]
        ours, peer = (
            _told(settings, side, ranks, {"gradients": file}) for side, file in zip(("ours", "jax"), files, strict=True)
        )
        try:
            return _measured(settings, ranks, ours, peer, files)
        except (ChildProcessError, BrokenPipeError) as error:
            print(f"{settings['name']}: {error}", file=sys.stderr)
            return None
        finally:
            ours.end()
            peer.end()


def alone_by_turns(settings: dict[str, Any], ranks: int) -> dict[str, Any] | None:
    """What `footprint.py` finds, of a peer in a process of its own."""
    told = _told(settings, "jax", ranks, {}, THRESHOLD)
    try:
        return told("alone", 0)[0]
    except (ChildProcessError, BrokenPipeError) as error:
        print(f"{settings['name']}: {error}", file=sys.stderr)
        return None
    finally:
        told.end()


def _told(
    settings: dict[str, Any],
    side: str,
    ranks: int,
    more: dict[str, Any],
    environment: dict[str, str] | None = None,
) -> Told:
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks}", "JAX_PLATFORMS": "cpu"}
    processes = ranks if side == "ours" else 1
    return Told({**settings, "side": side, "ranks": ranks, **more}, processes, {**(environment or {}), **flags})


def _measured(settings: dict[str, Any], ranks: int, ours: Told, peer: Told, files: list[str]) -> dict[str, Any]:
    ours("gradients", 0)
    peer("gradients", 0)
    a, b = (dict(np.load(file)) for file in files)
    worst = max(float(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max()) for name in b)
    losses = [(ours("step", i)[0]["loss"], peer("step", i)[0]["loss"]) for i in range(CHECKED_STEPS)]
    contestants = [(ours, "step"), (peer, "step"), (ours, "plain")]
    if settings["bounds"]:
        contestants += [(ours, "staged"), (ours, "plain at once"), (ours, "quiet")]
    times: list[list[float]] = [[0.0] * settings["rounds"] for _ in contestants]
    work: list[list[float]] = [[0.0] * settings["rounds"] for _ in contestants]
    for which, step, place in turns_of(len(contestants), settings["rounds"]):
        told, command = contestants[which]
        answers = told(command, step)
        times[which][place] = max(answer["s"] for answer in answers)
        work[which][place] = sum(answer["work_s"] for answer in answers)
    return row_of(settings, ranks, times, work, losses, worst)
