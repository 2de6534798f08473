"""One rank's gradient step, staged, against plain eager autograd on the same function: interleaved pairs.

    python benchmarks/staged_step.py --pairs 40

Both compute gradients and value of `examples/gpt.py` with the same kernels (ours without oneDNN) on one thread; no
optimizer. Ours is called as a user calls it: `fp.compile(fp.grad_and_value(plan(loss)), mesh)(params, tokens)`.
`--profile` times ops.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import optree
import report
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt

import functional_parallel as fp
from sharding_specs import Mesh, split

SIZES = {"tiny": (4, 128), "small": (4, 256), "wide": (4, 512)}  # layers, width
HEAD = ("size", "layers × width", "batch × time", "pairs", "ours, ms", "eager, ms", "ratio", "quartiles of the ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["tiny", "small"])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--time", type=int, default=128)
    parser.add_argument("--profile", type=int, metavar="LINES", help="print the ops that take most, ours and eager")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = False
    table = report.table(HEAD, [measure(size, args) for size in args.sizes])
    print(table)
    if args.write:
        report.write("staged step", table)


def measure(size: str, args: argparse.Namespace) -> tuple[object, ...]:
    layers, width = SIZES[size]
    config = gpt.Config(layers=layers, embed=width, heads=4, time=args.time)
    params, _ = split(gpt.init(config))
    tokens = torch.randint(0, config.vocab, (args.batch, args.time + 1), generator=torch.Generator().manual_seed(1))
    loss = partial(gpt.loss, config=config)
    staged = partial(fp.compile(fp.grad_and_value(fp.data_parallel("data")(loss)), Mesh(data=1)), params, tokens)
    plain = partial(eager, loss, params, tokens)
    check(staged(), plain())
    if args.profile:
        for name, step in (("ours", staged), ("eager", plain)):
            print(f"{name}\n{profiled(step, args.profile)}")
    ours, theirs = interleaved(staged, plain, args.pairs)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    a, b = statistics.median(ours), statistics.median(theirs)
    low, high = report.spread(ratios)
    shape = (f"{layers}×{width}", f"{args.batch}×{args.time}", args.pairs)
    return size, *shape, f"{1000 * a:.2f}", f"{1000 * b:.2f}", f"{a / b:.3f}", f"{low:.3f} – {high:.3f}"


def eager(loss: Callable[..., torch.Tensor], params: Any, tokens: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """What one writes without this library: leaves that require gradients, `backward()`, `.grad`."""
    leaves = optree.tree_map(lambda x: x.detach().requires_grad_(), params)
    value = loss(leaves, tokens)
    value.backward()
    return optree.tree_map(lambda x: x.grad, leaves), value.detach()


def check(ours: Any, theirs: Any) -> None:
    for a, b in zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def interleaved(a: Callable[[], Any], b: Callable[[], Any], pairs: int) -> tuple[list[float], list[float]]:
    """Processor seconds of both, in turn and in changing order, after a warm-up of three.

    One thread computes throughout, so this is the time on an idle machine; what else runs here does not count.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for index in range(-3, pairs):
        for which in (0, 1) if index % 2 else (1, 0):
            began = time.process_time()
            (a, b)[which]()
            if index >= 0:
                times[which].append(time.process_time() - began)
    return times


def profiled(step: Callable[[], Any], lines: int) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            step()
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=lines))


if __name__ == "__main__":
    main()
