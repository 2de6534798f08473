"""Processor seconds of `fp.search_pipeline` for layers of a 7B model, beside those of lowering one training step.

    python benchmarks/search_time.py --layers 8 --ranks 8

Nothing is computed: parameters and tokens are shapes without storage, 4096 wide with 32 heads over 2048 tokens and a
vocabulary of 32000. `--memory inf` searches without a limit. `--profile` shows the functions that take most.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt

import functional_parallel as fp
from sharding_specs import Mesh, split


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64, help="samples of a step's batch")
    parser.add_argument("--memory", type=float, default=80e9, help="bytes per rank")
    parser.add_argument("--profile", type=int, metavar="LINES", help="print the functions that take most")
    args = parser.parse_args()

    config = gpt.Config(args.layers, embed=4096, heads=32, time=2048, vocab=32000)
    with torch.device("meta"):
        params, _ = split(gpt.init(config))
    loss = partial(gpt.loss, config=config)
    tokens = torch.empty(args.samples, config.time + 1, dtype=torch.int64, device="meta")
    step = fp.train_step(loss, fp.optim.adamw(1e-4), Mesh(pipe=args.ranks), fp.pipeline("pipe", microbatches=16))
    _, lowered = seconds(lambda: step.lower(params, tokens).memory())
    machine = fp.schedules.Machine(args.ranks, args.memory, 1e-5, 50e9, 50e9, 1e-5)
    profile = cProfile.Profile()
    search = partial(
        fp.search_pipeline, loss, params, tokens, machine=machine, speed=4e14, optimizer=fp.optim.adamw(1e-4)
    )
    found, searched = seconds(partial(profile.runcall, search) if args.profile else search)
    count, read = seconds(lambda: len(found))
    print(f"{args.layers} layers, {args.ranks} ranks, {args.samples} samples, first {found[0].plan}")
    print(
        f"seconds of processor time: one step lowered {lowered:.1f}, search {searched:.1f}, "
        f"all {count} choices {read:.1f} more"
    )
    if args.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(args.profile)


def seconds(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the processor seconds that it takes."""
    before = time.process_time()
    result = run()
    return result, time.process_time() - before


if __name__ == "__main__":
    main()
