"""Training steps against the peers': the same model, data, seed and optimizer, in turn in the same processes.

    python benchmarks/compare.py --quick                       # tiny and small, 2 ranks
    python benchmarks/compare.py --sizes wide --ranks 4 --peers DDP "DTensor TP" --json

Ranks are gloo processes with one thread each, started here. First the machine is measured. Then, of every pair, all
gradients of the first step are compared, then the losses of a few steps, then steps are timed: ours, the peer's, one
plain step on a single rank, our staged one there, a plain one on every rank at once, and ours without its
communication, in turn, each between barriers, the slowest rank counting. `ideal` is the plain single step over the
number of ranks, `at once` that of all ranks; `work` is the processor time of all ranks together: without the waiting,
and the same on a busy machine. Last, each of the two runs alone, for bytes, memory and start-up. Rows that miss their
target (`targets.py`) are listed with what stands against it.

Ours and the torch peers call the same kernels: torch's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from typing import Any

import machine
import optional
import report
import targets
from by_turns import alone_by_turns, by_turns
from launch import launched, twice
from model import SIZES, Config
from resident import THRESHOLD

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
    "DeepSpeed ZeRO-1",
    "JAX DP",
    "JAX TP",
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
ALONE_HEAD = (
    "peer",
    "size",
    "ranks",
    "ours sends, MB",
    "peer sends, MB",
    "ours ÷ peer",
    "ours holds, MiB",
    "peer holds, MiB",
    "ours ÷ peer",
    "our tensors, MiB",
    "peer's tensors, MiB",
    "ours ÷ peer",
    "ours starts, s",
    "peer starts, s",
    "ours ÷ at once",
    "peer ÷ at once",
    "ours ÷ bound",
    "peer ÷ bound",
    "staged + transfer, ms",
    "ours ÷ it",
)


def main() -> None:
    args = arguments()
    limits = {ranks: measured_machine(ranks, args) for ranks in args.ranks}
    rows = [
        row
        for ranks in args.ranks
        for size in args.sizes
        for name in args.peers
        for row in compared(name, size, ranks, limits[ranks], args)
    ]
    tables = {
        "peers": report.table(HEAD, [cells(row) for row in rows]),
        "peers alone": report.table(ALONE_HEAD, [alone_cells(row) for row in rows if "ours_start_s" in row]),
        "misses": targets.judged(rows),
        "machine": report.table(machine.HEAD, [line for ranks in args.ranks for line in machine.cells(limits[ranks])]),
    }
    if args.no_footprint:
        del tables["peers alone"]
    print(json.dumps(rows, indent=1) if args.json else "\n\n".join(tables.values()))
    if args.write:
        for section, table in tables.items():
            report.write(section, table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny and small, 2 ranks, peers with a target, few steps; no bounds, bytes, memory or start-up",
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["tiny", "small"])
    parser.add_argument("--peers", nargs="+", choices=NAMES, help="default: all; quick: those with a target")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=None, help="timed steps of each (default 40, quick 5)")
    parser.add_argument("--no-footprint", action="store_true", help="times only: no bounds, bytes, memory, start-up")
    parser.add_argument("--profile", type=int, metavar="LINES", help="print what takes our step's time on rank 0")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md")
    args = parser.parse_args()
    if args.write and (args.quick or args.no_footprint):
        parser.error("--write needs every column: leave out --quick and --no-footprint")
    if args.write:
        report.parts_around("peers")  # fails now rather than after measuring if the page has no such section
    args.rounds = args.rounds or (5 if args.quick else 40)
    if args.rounds < 2:
        parser.error(f"--rounds {args.rounds}: at least 2, or there are no quartiles")
    args.peers = args.peers or (list(targets.TARGETS) if args.quick else NAMES)
    args.no_footprint |= args.quick
    return args


def measured_machine(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    limits = launched("machine.py", {"sizes": args.sizes}, ranks)
    if limits is None:
        raise SystemExit(f"measuring the machine with {ranks} ranks failed: see above")
    return limits


def compared(
    name: str, size: str, ranks: int, limits: dict[str, Any], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """One pair in processes of its own, so that what one leaves behind does not slow the next; then each alone."""
    reason = optional.missing(name) or unfit(name, SIZES[size], ranks)
    if reason:
        print(f"{name} on {size} with {ranks} ranks is left out: {reason}", file=sys.stderr)
        return []
    settings = {
        "name": name,
        "size": size,
        "rounds": args.rounds,
        "profile": args.profile,
        "bounds": not args.no_footprint,
    }
    measure = by_turns if name.startswith("JAX") else partial(launched, "worker.py")
    row = twice(partial(measure, settings, ranks), f"{name} on {size} with {ranks} ranks")
    if row is None:
        return []
    if not args.no_footprint:
        row |= alone(name, size, ranks, args)
        row |= distances(row, limits)
    print(*cells(row), sep=" | ", file=sys.stderr, flush=True)
    return [row]


def unfit(name: str, config: Config, ranks: int) -> str | None:
    """Why a peer cannot train a model of this shape on so many ranks."""
    chunks = {"GPipe": 1, "1F1B": 1, "interleaved 1F1B": 2, "ZBV": 2}.get(name, 0)
    if chunks * ranks > config.layers:
        return (
            f"{chunks} chunks on each of {ranks} ranks are {chunks * ranks} stages, and it has {config.layers} layers"
        )
    if "TP" in name or "SP" in name:
        return f"{config.heads} heads do not go into {ranks} parts" if config.heads % ranks else None
    return f"{config.batch} samples do not go into {ranks} parts" if not chunks and config.batch % ranks else None


def alone(name: str, size: str, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes, memory and start-up of ours and of the peer."""
    row: dict[str, Any] = {}
    for side in ("ours", "peer"):
        settings = {"name": name, "size": size, "side": side}
        in_one_process = side == "peer" and name.startswith("JAX")
        measure = alone_by_turns if in_one_process else partial(launched, "footprint.py", environment=THRESHOLD)
        found = twice(partial(measure, settings, ranks), f"{name} on {size} with {ranks} ranks, {side} alone,")
        if found is None:
            return {}
        row |= {f"{side}_{key}": value for key, value in found.items()}
    ratios = {
        "sent_ratio": "sent_bytes",
        "peak_ratio": "peak_bytes",
        "tensor_ratio": "tensor_bytes",
        "start_ratio": "start_s",
    }
    return {**row, **{ratio: row[f"ours_{key}"] / row[f"peer_{key}"] for ratio, key in ratios.items()}}


def distances(row: dict[str, Any], limits: dict[str, Any]) -> dict[str, float]:
    """How far each is from its share of the computing and from its bytes over the machine's bandwidth."""
    if "ours_sent_bytes" not in row:
        return {}
    ours = machine.bound(limits, row["staged_single_s"], row["ours_sent_bytes"])
    peer = machine.bound(limits, row["single_s"], row["peer_sent_bytes"])
    floor = row["quiet_s"] + row["ours_sent_bytes"] / machine.bandwidth(limits)
    return {
        "core_flops": limits["flops"][row["config"]],
        "bandwidth": machine.bandwidth(limits),
        "bound_s": ours,
        "peer_bound_s": peer,
        "bound_ratio": row["ours_s"] / ours,
        "peer_bound_ratio": row["peer_s"] / peer,
        "floor_s": floor,
        "floor_ratio": row["ours_s"] / floor,
    }


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


def alone_cells(row: dict[str, Any]) -> tuple[object, ...]:
    def pair(key: str, unit: float, digits: int) -> tuple[str, str]:
        return tuple(f"{row[f'{side}_{key}'] / unit:.{digits}f}" for side in ("ours", "peer"))  # type: ignore[return-value]

    return (
        row["name"],
        row["config"],
        row["ranks"],
        *pair("sent_bytes", 1e6, 2),
        f"{row['sent_ratio']:.2f}",
        *pair("peak_bytes", 1 << 20, 0),
        f"{row['peak_ratio']:.2f}",
        *pair("tensor_bytes", 1 << 20, 1),
        f"{row['tensor_ratio']:.2f}",
        *pair("start_s", 1, 2),
        f"{row['at_once_ratio']:.2f}",
        f"{row['peer_at_once_ratio']:.2f}",
        f"{row['bound_ratio']:.2f}",
        f"{row['peer_bound_ratio']:.2f}",
        f"{1000 * row['floor_s']:.1f}",
        f"{row['floor_ratio']:.2f}",
    )


if __name__ == "__main__":
    main()
