"""One rank's gradient step, staged, against plain eager autograd on the same function: interleaved pairs.

    python benchmarks/staged_step.py --pairs 40
    python benchmarks/staged_step.py --backend inductor

Both compute gradients and value of `examples/gpt.py` with the same kernels on one thread; no optimizer. Ours is called
as a user calls it: `fp.compile(fp.grad_and_value(plan(loss)), mesh)(params, tokens)`. `--profile` times ops.
`--backend inductor` adds columns: ours again, compiled, in turn with the other two.
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
COMPILED = ("inductor, ms", "÷ ours", "quartiles", "÷ eager", "compiling, s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["tiny", "small"])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--time", type=int, default=128)
    parser.add_argument("--profile", type=int, metavar="LINES", help="print the ops that take most, ours and eager")
    parser.add_argument("--backend", choices=["eager", "inductor"], default="eager", help="what ours is run by, too")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head = HEAD if args.backend == "eager" else HEAD + COMPILED
    table = report.table(head, [measure(size, args) for size in args.sizes])
    print(table)
    if args.write:
        report.write("staged step", table)


def measure(size: str, args: argparse.Namespace) -> tuple[object, ...]:
    layers, width = SIZES[size]
    config = gpt.Config(layers=layers, embed=width, heads=4, time=args.time)
    params, _ = split(gpt.init(config))
    tokens = torch.randint(0, config.vocab, (args.batch, args.time + 1), generator=torch.Generator().manual_seed(1))
    loss = partial(gpt.loss, config=config)
    function = fp.grad_and_value(fp.data_parallel("data")(loss))
    steps = {
        "ours": partial(fp.compile(function, Mesh(data=1)), params, tokens),
        "eager": partial(eager, loss, params, tokens),
    }
    if args.backend != "eager":
        steps["compiled"] = partial(fp.compile(function, Mesh(data=1), backend=args.backend), params, tokens)
    first, results = {}, {}
    for name, step in steps.items():
        began = time.perf_counter()
        results[name] = step()
        first[name] = time.perf_counter() - began
    for result in results.values():
        check(result, results["eager"])
    if args.profile:
        for name, step in steps.items():
            print(f"{name}\n{profiled(step, args.profile)}")
    times = interleaved(steps, args.pairs)
    row = compared(times, "ours", "eager")
    shape = (f"{layers}×{width}", f"{args.batch}×{args.time}", args.pairs)
    if args.backend == "eager":
        return size, *shape, *row
    took, _, to_ours, quartiles = compared(times, "compiled", "ours")
    _, _, to_eager, _ = compared(times, "compiled", "eager")
    return size, *shape, *row, took, to_ours, quartiles, to_eager, f"{first['compiled'] - first['ours']:.0f}"


def compared(times: dict[str, list[float]], name: str, other: str) -> tuple[str, ...]:
    """The medians of both in milliseconds, their ratio, and the quartiles of the ratios pair by pair."""
    a, b = statistics.median(times[name]), statistics.median(times[other])
    low, high = report.spread([x / y for x, y in zip(times[name], times[other], strict=True)])
    return f"{1000 * a:.2f}", f"{1000 * b:.2f}", f"{a / b:.3f}", f"{low:.3f} – {high:.3f}"


def eager(loss: Callable[..., torch.Tensor], params: Any, tokens: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """What one writes without this library: leaves that require gradients, `backward()`, `.grad`."""
    leaves = optree.tree_map(lambda x: x.detach().requires_grad_(), params)
    value = loss(leaves, tokens)
    value.backward()
    return optree.tree_map(lambda x: x.grad, leaves), value.detach()


def check(ours: Any, theirs: Any) -> None:
    for a, b in zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def interleaved(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Processor seconds of each, in turn and in changing order, after a warm-up of three.

    One thread computes throughout, so this is the time on an idle machine; what else runs here does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(-3, rounds):
        for name in list(steps)[:: 1 if index % 2 else -1]:
            began = time.process_time()
            steps[name]()
            if index >= 0:
                times[name].append(time.process_time() - began)
    return times


def profiled(step: Callable[[], Any], lines: int) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            step()
    return str(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=lines))


if __name__ == "__main__":
    main()
