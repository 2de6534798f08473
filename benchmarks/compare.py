"""Training steps against the peers': the same model, data, seed and optimizer, in turn in the same processes.

    python benchmarks/compare.py --quick                       # tiny and small, 2 ranks
    python benchmarks/compare.py --sizes wide --peers DDP "DTensor TP" --json

Ranks are gloo processes with one thread each, started here. Of every pair, first all gradients of the first step are
compared, then the losses of a few steps, then steps are timed: ours, the peer's and one plain step on a single rank in
turn, each between barriers, the slowest rank counting. `ideal` is that single step over the number of ranks. `work` is
the processor time of all ranks together: without the waiting, and the same on a busy machine.

Ours multiplies large float32 matrices with oneDNN, as `torch.compile` does, where eager torch calls MKL: on an AMD
EPYC that alone makes a step a third shorter. `--same-kernels` leaves all to MKL.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
from model import SIZES

NAMES = (
    "DDP",
    "FSDP2, resharding",
    "FSDP2, keeping",
    "ZeroRedundancyOptimizer",
    "DTensor TP",
    "DTensor SP",
    "GPipe",
    "1F1B",
    "interleaved 1F1B",
    "ZBV",
)
HEAD = (
    "peer",
    "size",
    "ranks",
    "ours, ms",
    "peer, ms",
    "ours ÷ peer",
    "quartiles",
    "work ÷ work",
    "ours ÷ ideal",
    "peer ÷ ideal",
    "equal",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny and small, 2 ranks, fewer steps")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "small"])
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=None, help="timed steps of each (default 40, quick 15)")
    parser.add_argument("--same-kernels", action="store_true", help="matrix products by eager torch's kernel for all")
    parser.add_argument("--profile", type=int, metavar="LINES", help="print what takes our step's time on rank 0")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    if args.write and args.same_kernels:
        parser.error("--write is for the kernels that users get: leave --same-kernels out")
    args.rounds = args.rounds or (15 if args.quick else 40)
    rows = [row for size in args.sizes for name in args.peers for row in launched(name, size, args)]
    table = report.table(HEAD, [cells(row) for row in rows])
    print(json.dumps(rows, indent=1) if args.json else table)
    if args.write:
        report.write("peers", table)


def launched(name: str, size: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One pair in processes of its own, so that what one leaves behind does not slow the next."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        out = Path(folder) / "row.json"
        chosen = {"rounds": args.rounds, "profile": args.profile, "same_kernels": args.same_kernels}
        settings = {"name": name, "size": size, **chosen, "out": str(out)}
        command = [sys.executable, str(Path(__file__).with_name("worker.py")), json.dumps(settings)]
        shared = {"WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environments = [
            {**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(args.ranks)
        ]
        ranks = [subprocess.Popen(command, env=environment) for environment in environments]
        if any([rank.wait() for rank in ranks]):
            print(f"{name} on {size} failed", file=sys.stderr)
            return []
        row = json.loads(out.read_text())
        print(*cells(row), sep=" | ", file=sys.stderr, flush=True)
        return [row]


def cells(row: dict[str, Any]) -> tuple[object, ...]:
    times = (f"{1000 * row[key]:.1f}" for key in ("ours_s", "peer_s"))
    low, high = row["quartiles"]
    ratios = (
        f"{row['ratio']:.2f}",
        f"{low:.2f} – {high:.2f}",
        f"{row['work_ratio']:.2f}",
        f"{row['ideal_ratio']:.2f}",
        f"{row['peer_ideal_ratio']:.2f}",
    )
    return (row["name"], row["config"], row["ranks"], *times, *ratios, "yes" if row["losses_equal"] else "NO")


if __name__ == "__main__":
    main()
