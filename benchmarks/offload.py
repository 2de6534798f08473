"""How much of the time of moves between memories is hidden, on an emulated link, and on this machine's disk.

    python benchmarks/offload.py                  # prints the tables
    python benchmarks/offload.py --write          # and puts them into docs/benchmarks.md

One rank trains a network, with its state on the host or on disk, by ZeRO-2's plan. A move over the emulated link
copies, and then sleeps for its bytes ÷ bandwidth, which takes no core. At a balance of 1, all moves of a step take as
long as the step without a link. "Not hidden" is (time − the longer of moves and step without a link) ÷ the shorter: 0
if the shorter is hidden behind the longer, 1 if nothing is. Times are medians of `--steps` steps, each after one at the
same speed; the speeds take turns, and the spread is from the first to the third quartile.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import report
import torch

import functional_parallel as fp
from functional_parallel.program import memory_moves
from functional_parallel.runtime.processes import started_moves
from sharding_specs import Mesh

BALANCES = (0.5, 1.0, 2.0)
CLIPPED = "the same, clipped"
WIDTH, LAYERS, ROWS = 768, 8, 1024


class EmulatedLink:
    """Stands in for the copy of a move."""

    def __init__(self) -> None:
        self.copy, self.bandwidth = started_moves.copy_into, float("inf")

    def __call__(self, target: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result = self.copy(target, x)
        time.sleep(x.nbytes / self.bandwidth)
        return result


def loss(params: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for w in params:
        x = x + torch.tanh(x @ w)
    return x.square().mean()


def plans(folder: str) -> dict[str, Any]:
    precision = fp.mixed_precision("bf16", reduce="bf16")
    host, disk = fp.offload(state="host", group="8MiB"), fp.offload(state="disk", path=folder, group="8MiB")
    return {
        "state on the host": fp.chain(precision, fp.zero(2, "data"), host),
        CLIPPED: fp.chain(precision, fp.zero(2, "data"), host),
        "the same, 4 microbatches": fp.chain(precision, fp.zero(2, "data"), host, fp.accumulate(4)),
        "state on disk": fp.chain(precision, fp.zero(2, "data"), disk),
        "parameters on the host": fp.chain(precision, fp.zero(3, "data"), fp.offload(parameters="host")),
    }


def measured(name: str, folder: str, steps: int) -> list[list[object]]:
    """Rows of a plan: times without a link, and at each balance."""
    link = started_moves.copy_into = EmulatedLink()  # type: ignore[assignment]
    memory_moves.LEAST = 0
    torch.manual_seed(0)
    params, x = [torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(LAYERS)], torch.randn(ROWS, WIDTH)
    plan, clip = plans(folder)[name], 1.0 if name == CLIPPED else None
    train = fp.train_step(loss, fp.optim.adamw(1e-4), Mesh(data=1), plan, bucket=4 << 20, clip=clip)
    state = train.init(params)
    for _ in range(2):
        state, metrics = train(state, x)
    moved = sum(train.program.bytes_moved().values())
    times: dict[float, list[float]] = {balance: [] for balance in (0.0, *BALANCES)}
    alone = 0.0
    for _ in range(steps):
        for balance, found in times.items():
            link.bandwidth = moved / (balance * alone) if balance else float("inf")
            state, _ = train(state, x)  # ends the moves of another speed, which outlast a step
            began = time.perf_counter()
            state, metrics = train(state, x)
            metrics.loss.item()
            found.append(time.perf_counter() - began)
            alone = statistics.median(times[0.0])
    return [row(name, moved, alone, balance, found) for balance, found in times.items()]


def row(name: str, moved: int, alone: float, balance: float, found: list[float]) -> list[object]:
    time_, (first, third) = statistics.median(found), report.spread(found)
    moves = balance * alone
    open_ = f"{(time_ - max(moves, alone)) / min(moves, alone):.2f}" if balance else ""
    spread = f"{1000 * first:.0f} – {1000 * third:.0f}"
    return [name, f"{moved / 2**20:.1f}", balance or "no link", f"{1000 * time_:.0f}", spread, open_]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    head = ("plan", "MiB moved", "balance", "ms", "spread", "not hidden")
    with tempfile.TemporaryDirectory() as folder:
        rows = [each for name in plans(folder) for each in fp.launch(measured, 1, name, folder, args.steps)[0]]
    text = report.table(head, rows)
    print(text)
    if args.write:
        report.write("offload", text)


if __name__ == "__main__":
    main()
