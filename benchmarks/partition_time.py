"""How long a GPT takes from function to flat program: plan, trace, partition, stage, at several depths.

    python benchmarks/partition_time.py --layers 12 24 48

Nothing is computed: parameters and tokens are shapes without storage. The mesh is data=2, tensor=2, with Megatron's
specs and ZeRO-3, so that both axes write collectives; forward and backward are both staged. Each depth runs in a
process of its own, so that its peak memory is its own. `--profile` shows where the time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import subprocess
import sys
import time
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

PLANS = ("tensor, zero 3", "data")
HEAD = ("plan", "layers", "ops", "collectives", "seconds", "ms per layer", "peak memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24, 48])
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument("--plan", choices=PLANS, nargs="+", default=PLANS)
    parser.add_argument("--profile", type=int, metavar="LINES", help="print the functions that take most")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    parser.add_argument("--here", action="store_true", help="one depth in this process, its row as JSON")
    args = parser.parse_args()
    if args.here or args.profile:
        print(json.dumps(measure(args.plan[0], args.layers[0], args.embed, args.profile)))
        return
    rows = [apart(plan, layers, args.embed) for plan in args.plan for layers in args.layers]
    table = report.table(HEAD, [cells(row) for row in rows])
    print(table)
    if args.write:
        report.write("partition time", table)


def measure(name: str, layers: int, embed: int, profile: int | None = None) -> dict[str, Any]:
    """Stage one GPT, and count what came of it."""
    torch.set_num_threads(1)
    config = gpt.Config(layers=layers, embed=embed, heads=4, time=128)
    params, specs = split(gpt.init(config))
    params = optree.tree_map(lambda x: x.to("meta"), params)
    tokens = torch.empty(8, config.time + 1, dtype=torch.int64, device="meta")
    mesh, plan = chosen(name, specs)

    profiler = cProfile.Profile() if profile else None
    if profiler is not None:
        profiler.enable()
    began = time.perf_counter()
    program = fp.compile(fp.grad_and_value(plan(partial(gpt.loss, config=config))), mesh).lower(params, tokens)
    seconds = time.perf_counter() - began
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(profile)
    ops = sum(1 for _ in program.traced.nodes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # a process of its own: the peak is this depth's
    return {
        "plan": name,
        "layers": layers,
        "ops": ops,
        "collectives": sum(program.counts().values()),
        "seconds": seconds,
        "MiB": peak,
    }


def chosen(name: str, specs: Any) -> tuple[Mesh, Any]:
    if name == "data":
        return Mesh(data=2), fp.data_parallel("data")
    return Mesh(data=2, tensor=2), fp.chain(fp.tensor_parallel("tensor", specs), fp.zero(3, "data"))


def apart(name: str, layers: int, embed: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--here", "--plan", name, "--layers", str(layers), "--embed", str(embed)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(result.stdout))


def cells(row: dict[str, Any]) -> tuple[object, ...]:
    per_layer = f"{1000 * row['seconds'] / row['layers']:.0f}"
    return (
        *(row[key] for key in ("plan", "layers", "ops", "collectives")),
        f"{row['seconds']:.2f}",
        per_layer,
        f"{row['MiB']:.0f} MiB",
    )


if __name__ == "__main__":
    main()
