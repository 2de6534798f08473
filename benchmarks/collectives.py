"""Collectives between gloo processes by every transport, in turn in the same processes.

    python benchmarks/collectives.py                                  # 2 and 4 ranks, 4 KiB to 64 MiB
    python benchmarks/collectives.py --ranks 2 --sizes 65536 --kinds all_gather --algorithms shared backend --write

Each collective is run as a program runs it: through `ProcessCommunicator`, into new tensors. A size is the bytes of the
whole: the operand of a sum, the result of a gather. Between a barrier each, the slowest rank counts. Beside the median
stand the quartiles.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Callable

import report
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from functional_parallel.runtime import TRANSPORTS, ProcessCommunicator, communicator
from sharding_specs import Mesh

KINDS = ("all_reduce", "reduce_scatter", "all_gather")
NAMES = ("auto", *reversed(TRANSPORTS))
SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
AXES = ("data",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--algorithms", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    head = ("collective", "ranks", "bytes", *(f"{name}, ms" for name in args.algorithms))
    rows = [row for ranks in args.ranks for row in on_processes(ranks, args)]
    table = report.table(head, rows)
    print(table)
    if args.write:
        report.write("collectives", table)


def on_processes(ranks: int, args: argparse.Namespace) -> list[list[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    multiprocessing.spawn(rank_of, (ranks, port, args, results), nprocs=ranks)
    return results.get()


def rank_of(rank: int, ranks: int, port: int, args: argparse.Namespace, results: object) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    carriers = {name: communicator(Mesh(data=ranks), algorithm=name) for name in args.algorithms}
    rows = []
    for kind in args.kinds:
        for size in args.sizes:
            runs = [collective(carrier, kind, size, ranks) for carrier in carriers.values()]
            times = interleaved(runs, args.rounds)
            rows.append([kind, str(ranks), in_words(size), *map(cell, times)])
            if rank == 0:
                print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    if rank == 0:
        results.put(rows)
    dist.barrier()
    dist.destroy_process_group()


def collective(carrier: ProcessCommunicator, kind: str, size: int, ranks: int) -> Callable[[], torch.Tensor]:
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // ranks)
    if kind == "all_reduce":
        return lambda: carrier.psum(whole, AXES)
    if kind == "reduce_scatter":
        return lambda: carrier.psum_scatter(whole, AXES, 0)
    return lambda: carrier.all_gather(part, AXES, 0)


def interleaved(runs: list[Callable[[], torch.Tensor]], rounds: int) -> list[list[float]]:
    """Seconds of the slowest rank, for each in turn, the order turning round."""
    times = torch.zeros(len(runs), rounds, dtype=torch.float64)
    for index in range(-2, rounds):
        for which in range(len(runs)) if index % 2 else reversed(range(len(runs))):
            dist.barrier()
            began = time.perf_counter()
            runs[which]()
            times[which, max(index, 0)] = time.perf_counter() - began
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def cell(seconds: list[float]) -> str:
    low, high = report.spread(seconds)
    return f"{1000 * statistics.median(seconds):.3g} ({1000 * low:.3g} – {1000 * high:.3g})"


def in_words(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size / 1024:.3g} KiB"


if __name__ == "__main__":
    main()
