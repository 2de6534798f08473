"""Speed and memory of training steps on a GPU: contestants in processes of their own, which take turns."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import report
import torch
from gpu_contestants import CONTESTANTS, EAGER
from row import turns_of

HERE = Path(__file__).parent
GIB = 1 << 30
EACH = 20  # GiB that a process of the largest contestant takes
AT_ONCE, ROUNDS = 3, 5  # steps of a turn, turns
LONGEST = 180.0  # seconds of a process, then it is killed

SPEED_HEAD = (
    "model",
    "contestant",
    "ms",
    "quartiles",
    "÷ eager torch",
    "ms without waits",
    "TFLOP/s",
    "starts, s",
    "loss",
)
MEMORY_HEAD = (
    *("model", "contestant", "predicted, MiB", "allocated, MiB", "allocated ÷ predicted"),
    *("reserved − allocated, MiB", "largest inactive split, MiB"),
)
SMALL = ("torch.compile", "torch.compile, CUDA graphs", "ours", "ours, inductor", "ours, CUDA graph")
NAMES = {
    "gpt": tuple(name for name in CONTESTANTS if name not in (EAGER, "torch.compile, CUDA graphs")),
    "small gpt": (*SMALL, "ours, inductor, CUDA graph"),
    "group norm": ("torch.compile", "ours", "ours, inductor"),
}
PROFILED = (EAGER, "ours", "ours, inductor")
SHORT = {"small gpt": ("ours",)}


class Process:
    """A contestant, which begins at once."""

    def __init__(self, workload: str, name: str, device: str, short: bool) -> None:
        settings = {"workload": workload, "name": name, "device": device, "short": short}
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.workload, self.name = workload, name
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_worker.py"), json.dumps(settings)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._clock = threading.Timer(LONGEST, self._process.kill)
        self._clock.start()

    def ask(self, command: str, count: int = 0) -> Any:
        """Give a command and return the answer; None if the process ended, which has said why."""
        try:
            self._process.stdin.write(json.dumps([command, count]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer()

    def answer(self) -> Any:
        line = self._process.stdout.readline()
        return json.loads(line) if line else None

    def end(self) -> None:
        self._process.communicate()  # closes its input, at which it ends
        self._clock.cancel()


def contest(device: str, short: bool, times: bool) -> list[dict[str, Any]]:
    """Return a row per contestant. Each group of processes that are alive together has eager torch among them."""
    rows = []
    for workload, names in (SHORT if short else NAMES).items():
        if not times:
            names = [name for name in names if name.startswith("ours")] if workload == "gpt" or short else []
        for group in _groups(names, device):
            rows += _rows(workload, group, device, short, times)
    return rows


def _groups(names: Sequence[str], device: str) -> Iterator[list[str]]:
    most = 3 if device == "cpu" else max(2, torch.cuda.get_device_properties(0).total_memory // (EACH * GIB))
    for begin in range(0, len(names), most - 1):
        yield [EAGER, *names[begin : begin + most - 1]]


def _rows(workload: str, names: Sequence[str], device: str, short: bool, times: bool) -> list[dict[str, Any]]:
    processes = [Process(workload, name, device, short) for name in names]
    try:
        rows = []
        for process in processes:
            begun = process.answer()
            if begun is None:
                print(f"{workload}, {process.name}: the process ended, see above", file=sys.stderr)
            rows.append(
                {"workload": workload, "name": process.name, "ms": [], "loss": None, **(begun or {"failed": True})}
            )
        living = [(row, process) for row, process in zip(rows, processes, strict=True) if "failed" not in row]
        if times:
            _time(living, 1 if short else ROUNDS, AT_ONCE)
        for row, process in living:
            if "failed" not in row:
                row["memory"] = process.ask("memory")
            if times and process.name in PROFILED and (short or workload == "gpt"):
                row["kernels"] = process.ask("kernels", 2 if short else 12)
        return rows
    finally:
        for process in processes:
            process.end()


def _time(living: Sequence[tuple[dict[str, Any], Process]], rounds: int, count: int) -> None:
    for which, _, _ in turns_of(len(living), rounds):
        row, process = living[which]
        answer = None if "failed" in row else process.ask("turn", count)
        if answer is None:
            row["failed"] = True
        else:
            row.update(ms=[*row["ms"], *answer["ms"]], loss=answer["loss"])
    for row, process in living:
        answer = None if "failed" in row else process.ask("free", count * rounds)
        row.update({"failed": True} if answer is None else {"free": answer["ms"]})


# --- Tables ---


def speed_table(rows: Sequence[dict[str, Any]]) -> str:
    lines, eager = [], 0.0
    for row in rows:
        if "failed" in row:
            lines.append((row["workload"], row["name"], "failed", *[""] * 6))
            continue
        median = statistics.median(row["ms"])
        if row["name"] == EAGER:
            eager = median
        first, third = report.spread(row["ms"])
        speed = f"{row['flops'] / row['free'] / 1e9:.0f}" if row["flops"] else ""
        lines.append(
            (
                *(row["workload"], row["name"], f"{median:.2f}", f"{first:.2f} – {third:.2f}", f"{median / eager:.2f}"),
                *(f"{row['free']:.2f}", speed, f"{row['start_s']:.1f}", f"{row['loss']:.4f}"),
            )
        )
    return report.table(SPEED_HEAD, lines)


def memory_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        found = row.get("memory")
        if found is None:
            continue
        peak, predicted = found.get("peak"), found["predicted"]
        lines.append(
            (
                *(row["workload"], row["name"], _mib(predicted), _mib(peak)),
                f"{peak / predicted:.3f}" if peak and predicted else "",
                _mib(peak and found["reserved"] - peak),
                _mib(found.get("split")),
            )
        )
    return report.table(MEMORY_HEAD, lines)


def kernel_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        (row["name"], name[:80].replace("|", "/"), launches, f"{ms:.2f}")
        for row in rows
        for name, launches, ms in row.get("kernels") or ()
    ]
    return report.table(("contestant", "kernel", "launches in a step", "ms"), lines)


def _mib(size: float | None) -> str:
    return "" if size is None else f"{size:,.0f}"


def dropout_table(device: str, short: bool) -> str:
    """Return the time of dropout, forward and backward: ours, keyed, and torch's own."""
    import functional_parallel as fp

    x = torch.randn(1 << (10 if short else 26), device=device, dtype=torch.float32, requires_grad=True)
    key, weights = fp.random.key(0).to(device), torch.ones_like(x)

    def measured(draw: Callable[[torch.Tensor], torch.Tensor]) -> float:
        times = []
        for _ in range(3 if short else 20):
            begin = _now(device)
            draw(x).backward(weights)
            times.append(_now(device) - begin)
        return 1e3 * statistics.median(times)

    native = measured(lambda x: torch.nn.functional.dropout(x, 0.1))
    ours = measured(lambda x: fp.random.dropout(x, 0.1, key=key))
    head = ("elements", "torch's dropout, ms", "fp.random.dropout, ms", "ratio")
    return report.table(head, [(f"{x.numel():,}", f"{native:.2f}", f"{ours:.2f}", f"{ours / native:.2f}")])


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
