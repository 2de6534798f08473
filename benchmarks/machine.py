"""What the machine itself can do, measured before anything is compared: products, copies, messages, collectives.

`compare.py` starts it on as many ranks as it compares.
"""

from __future__ import annotations

import json
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import SIZES, Config

from functional_parallel.runtime import communicator
from sharding_specs import Mesh

__all__ = ["HEAD", "bandwidth", "bound", "cells"]

HEAD = ("what", "ranks", "measured")
_COPIED = 64 << 20
_TIMES = 15
_BATCH = 3
_SIZES = (1 << 12, 1 << 20)  # bytes of messages and all-reduces


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    network = lines(ranks)
    copying = copy_rate()  # all ranks at once
    dist.barrier()
    if dist.get_rank() == 0:
        products = {size: product_rate(SIZES[size]) for size in settings["sizes"]}
        alone = {"flops": products, "copy": copy_rate()}
        Path(settings["out"]).write_text(json.dumps({"ranks": ranks, **alone, "copy_all": copying, "lines": network}))
    dist.barrier()
    dist.destroy_process_group()


def product_rate(config: Config) -> float:
    """Return floating-point operations per second of one core, at the model's largest matrix product."""
    a, b = torch.randn(config.batch * config.time, config.embed), torch.randn(config.embed, 4 * config.embed)
    return 2 * a.numel() * b.shape[1] / _seconds(lambda: a @ b)


def copy_rate() -> float:
    """Bytes a second that a rank copies from memory to memory."""
    source, target = torch.zeros(2, _COPIED, dtype=torch.uint8)
    return _COPIED / _seconds(lambda: target.copy_(source))


def processor() -> str:
    """Return the processor's model, its widest vector instructions and torch's version."""
    linux = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.*)", linux.read_text()) if linux.exists() else []
    model = models[0] if models else platform.processor()
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"


def _seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def lines(ranks: int) -> dict[str, list[float]]:
    """Latency, and bytes a second that a rank sends; of an all-reduce those that it sends around a ring."""
    carrier = communicator(Mesh(all=ranks), algorithm="shared")
    of_a_ring = 2 * (ranks - 1) / ranks
    return {
        "message": _line(_shift, 1.0),
        "all_reduce, backend": _line(dist.all_reduce, of_a_ring),
        "all_reduce, shared": _line(lambda x: carrier.psum(x, ("all",)), of_a_ring),
    }


def _line(run: Callable[[torch.Tensor], object], sent: float) -> list[float]:
    """Return seconds of an empty operand, and bytes sent a second; `sent` is the share of the operand that is sent."""
    small, large = (_slowest(run, torch.zeros(size // 4)) for size in _SIZES)
    beta = max((large - small) / (_SIZES[1] - _SIZES[0]), 1e-12)  # else it is lost in noise
    return [max(0.0, small - beta * _SIZES[0]), sent / beta]


def _slowest(run: Callable[[torch.Tensor], object], x: torch.Tensor) -> float:
    """Return the slowest rank's best time, of several runs: a single message may arrive before it is waited for."""
    times = []
    for _ in range(_TIMES):
        run(x)  # touches the memory and synchronizes the ranks
        began = time.perf_counter()
        for _ in range(_BATCH):
            run(x)
        times.append((time.perf_counter() - began) / _BATCH)
    best = torch.tensor(min(times), dtype=torch.float64)
    dist.all_reduce(best, dist.ReduceOp.MAX)
    return best.item()


def _shift(x: torch.Tensor) -> None:
    """Send to one neighbour and receive from the other."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for work in (dist.irecv(torch.empty_like(x), (rank - 1) % ranks), dist.isend(x, (rank + 1) % ranks)):
        work.wait()


def bound(limits: dict[str, Any], single: float, sent: float) -> float:
    """Seconds that a step takes at best: its share of the computing, and its bytes by the fastest way there is."""
    return single / limits["ranks"] + sent / bandwidth(limits)


def bandwidth(limits: dict[str, Any]) -> float:
    """Bytes a second that a rank sends, by the fastest way that was measured."""
    return float(max(rate for _, rate in limits["lines"].values()))


def cells(limits: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return the rows of the table: the processor, then its speed."""
    ranks = limits["ranks"]
    rows: list[tuple[object, ...]] = [("processor", "", processor())]
    rows += [(f"matrix product, {size}", 1, f"{rate / 1e9:.0f} GFLOP/s") for size, rate in limits["flops"].items()]
    rows += [("copy", 1, f"{limits['copy'] / 1e9:.1f} GB/s")]
    rows += [("copy, all at once, each", ranks, f"{limits['copy_all'] / 1e9:.1f} GB/s")]
    for name, (alpha, rate) in limits["lines"].items():
        rows.append((name, ranks, f"{1e6 * alpha:.0f} µs + bytes sent / {rate / 1e9:.2f} GB/s"))
    return rows


if __name__ == "__main__":
    main()
