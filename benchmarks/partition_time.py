"""How long GPT-3 takes from function to flat program: plan, trace, partition, stage, at several depths.

    python benchmarks/partition_time.py --layers 12 24 48 96

Nothing is computed: parameters and tokens are shapes without storage, 12288 wide with 96 heads over 2048 tokens. The
vocabulary is 50257 rounded up to a multiple of 128, as Megatron-LM does so that a tensor axis divides it. Each row runs
in a process of its own, so that its peak memory is its own. Plans:

    tensor, zero 3    gradient and value on data=2, tensor=2: Megatron's specs and ZeRO-3, so both axes communicate
    data              the same on data=2, whole parameters on every rank
    step              a whole training step of the first, with AdamW and clipping
    pipeline          a training step on pipe=8, 1F1B over 8 microbatches, data=2

Seconds are processor time, of one thread. With `--calls` each row runs a second time, and Python's calls are counted,
which other programs on the machine do not change: as many per op at every depth means that nothing grows faster than
the program. `--profile` shows where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import math
import pstats
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import report
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt

import functional_parallel as fp
from sharding_specs import Mesh, split

PLANS = ("tensor, zero 3", "data", "step", "pipeline")
CALLS = "calls per op"
HEAD = ("plan", "layers", "ops", "collectives", CALLS, "seconds", "ms per layer", "peak memory")
SAMPLES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48, 96])
    parser.add_argument("--plan", choices=PLANS, nargs="+", default=PLANS)
    parser.add_argument("--calls", action="store_true", help="count Python's calls too, in a run of their own")
    parser.add_argument("--profile", type=int, metavar="LINES", help="print the functions that take most")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--here", action="store_true", help="one depth in this process, its row as JSON")
    args = parser.parse_args()
    if args.here or args.profile:
        print(json.dumps(measure(args.plan[0], args.layers[0], args.calls, args.profile)))
        return
    rows = [apart(plan, layers, args.calls) for plan in args.plan for layers in args.layers]
    table = report.table(HEAD if args.calls else [name for name in HEAD if name != CALLS], [cells(row) for row in rows])
    print(table)
    if args.write:
        report.write("partition time", table)


def measure(name: str, layers: int, count: bool, profile: int | None = None) -> dict[str, Any]:
    """Stage one GPT-3, and count what came of it."""
    torch.set_num_threads(1)
    vocab = 128 * math.ceil(50257 / 128)
    config = gpt.Config(layers=layers, embed=12288, heads=96, time=2048, vocab=vocab)
    with torch.device("meta"):
        params, specs = split(gpt.init(config))
    lower = staging(name, config, params, specs)

    profiler = cProfile.Profile() if profile or count else None
    if profiler is not None:
        profiler.enable()
    began = time.process_time()
    program = lower()
    seconds = time.process_time() - began
    calls = None
    if profiler is not None:
        profiler.disable()
        stats = pstats.Stats(profiler, stream=sys.stderr)
        calls = stats.total_calls  # type: ignore[attr-defined]
        if profile:
            stats.sort_stats("tottime").print_stats(profile)
    programs = [part for part, _ in program.programs()] if name == "pipeline" else [program]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # a process of its own: the peak is this depth's
    return {
        "plan": name,
        "layers": layers,
        "ops": sum(1 for part in programs for _ in part.traced.nodes),
        "collectives": sum(sum(part.counts().values()) for part in programs),
        "calls": calls,
        "seconds": seconds,
        "MiB": peak,
    }


def staging(name: str, config: gpt.Config, params: Any, specs: Any) -> Callable[[], Any]:
    """What makes the program of a plan."""
    loss = partial(gpt.loss, config=config)
    tokens = torch.empty(SAMPLES, config.time + 1, dtype=torch.int64, device="meta")
    tensor = fp.tensor_parallel("tensor", specs)
    if name == "data":
        return lambda: fp.compile(fp.grad_and_value(fp.data_parallel("data")(loss)), Mesh(data=2)).lower(params, tokens)
    if name == "pipeline":
        plan = fp.chain(fp.zero(1, "data"), fp.pipeline("pipe", schedule="1f1b", microbatches=8))
        mesh = Mesh(pipe=8, data=2)
    else:
        plan, mesh = fp.chain(tensor, fp.zero(3, "data")), Mesh(data=2, tensor=2)
    if name == "tensor, zero 3":
        return lambda: fp.compile(fp.grad_and_value(plan(loss)), mesh).lower(params, tokens)
    return lambda: fp.train_step(loss, fp.optim.adamw(1e-4), mesh, plan, clip=1.0).lower(params, tokens)


def apart(name: str, layers: int, count: bool) -> dict[str, Any]:
    """The row of a plan at a depth, measured in a process of its own; calls are counted in a second one."""
    command = [sys.executable, __file__, "--here", "--plan", name, "--layers", str(layers)]
    rows = []
    for options in [[], ["--calls"]][: 1 + count]:
        result = subprocess.run([*command, *options], check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(result.stdout))
    return {**rows[0], "calls": rows[-1]["calls"]}


def cells(row: dict[str, Any]) -> tuple[object, ...]:
    per_layer = f"{1000 * row['seconds'] / row['layers']:.0f}"
    return (
        *(row[key] for key in ("plan", "layers", "ops", "collectives")),
        *([] if row["calls"] is None else [f"{row['calls'] / row['ops']:.0f}"]),
        f"{row['seconds']:.2f}",
        per_layer,
        f"{row['MiB']:.0f} MiB",
    )


if __name__ == "__main__":
    main()
