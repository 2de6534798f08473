"""What the first training step of a small model costs, against the same step under torch.compile(backend="eager").

    python benchmarks/first_step.py --runs 7

All train `examples/gpt.py` with AdamW. Ours traces, partitions, differentiates and types the step, generates its code
and runs it. TorchDynamo traces the peers, and the backend runs the ops of their graphs as they are:

    loop        computes the loss, calls `backward` and `optimizer.step()` of torch.optim
    function    `torch.func.grad_and_value` and AdamW's formulas, from parameters and state to new ones, in one graph

Each run is a process of its own, the three in turn, on one thread. Seconds are processor time from the call of a first
step to its end. What all import is imported before: torch loads TorchDynamo for fake tensors too.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import optree
import report
import torch
from torch.utils._pytree import tree_map

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import gpt

import functional_parallel as fp
from sharding_specs import Mesh, split

SIZES = {"tiny": gpt.Config(layers=2, embed=64, heads=2, time=32), "small": gpt.Config(layers=4, embed=128)}
SIDES = ("ours", "loop", "function")
HEAD = ("size", "layers", "runs", "peer", "ours, s", "peer, s", "ratio", "quartiles of the ratio")
Step = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", choices=SIZES, nargs="+", default=["tiny", "small"])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--here", choices=SIDES, help="one first step in this process: its seconds and its loss")
    parser.add_argument("--write", action="store_true", help="put the table into docs/benchmarks.md")
    args = parser.parse_args()
    if args.here:
        print(*first_step(args.here, SIZES[args.sizes[0]]))
        return
    table = report.table(HEAD, [row for size in args.sizes for row in rows(size, args.runs)])
    print(table)
    if args.write:
        report.write("first step", table)


def first_step(side: str, config: gpt.Config) -> tuple[float, float]:
    """Processor seconds of the first step, and its loss."""
    import torch._dynamo

    torch.set_num_threads(1)
    params, _ = split(gpt.init(config))
    tokens = torch.randint(0, config.vocab, (8, config.time + 1), generator=torch.Generator().manual_seed(1))
    step = {"ours": ours, "loop": loop, "function": function}[side](partial(gpt.loss, config=config), params)
    began = time.process_time()
    loss = float(step(tokens))
    return time.process_time() - began, loss


def ours(loss: Callable[..., torch.Tensor], params: Any) -> Step:
    train = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(data=1), fp.data_parallel("data"))
    state = train.init(params)
    return lambda tokens: train(state, tokens)[1].loss


def loop(loss: Callable[..., torch.Tensor], params: Any) -> Step:
    params = optree.tree_map(lambda leaf: leaf.requires_grad_(), params)
    optimizer = torch.optim.AdamW(optree.tree_leaves(params), lr=1e-3)

    @torch.compile(backend="eager")
    def step(tokens: torch.Tensor) -> torch.Tensor:
        value = loss(params, tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def function(loss: Callable[..., torch.Tensor], params: Any) -> Step:
    @torch.compile(backend="eager")
    def step(params: Any, mean: Any, square: Any, count: torch.Tensor, tokens: torch.Tensor) -> Any:
        grads, value = torch.func.grad_and_value(loss)(params, tokens)
        mean = tree_map(lambda m, g: m + 0.1 * (g - m), mean, grads)
        square = tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, square, grads)
        return tree_map(partial(_moved, count), params, mean, square), mean, square, count + 1, value

    zeros = tree_map(torch.zeros_like, params)
    return lambda tokens: step(params, zeros, zeros, torch.tensor(1.0), tokens)[-1]


def _moved(count: torch.Tensor, p: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    direction = m / (1 - 0.9**count) / ((v / (1 - 0.999**count)).sqrt() + 1e-8)
    return p * (1 - 1e-5) - 1e-3 * direction


def rows(size: str, runs: int) -> Iterator[tuple[object, ...]]:
    found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for run in range(runs):
        for side in SIDES if run % 2 else SIDES[::-1]:
            found[side].append(apart(side, size))
    losses = [loss for side in SIDES for _, loss in found[side]]
    if max(losses) - min(losses) > 1e-4:
        raise SystemExit(f"{size}: the losses differ: {losses}")
    for peer in SIDES[1:]:
        seconds = [[spent for spent, _ in found[side]] for side in ("ours", peer)]
        ratios = [one / other for one, other in zip(*seconds, strict=True)]
        medians = (f"{statistics.median(spent):.2f}" for spent in seconds)
        first, third = report.spread(ratios)
        shown = f"{statistics.median(ratios):.2f}", f"{first:.2f} – {third:.2f}"
        yield (size, SIZES[size].layers, runs, peer, *medians, *shown)


def apart(side: str, size: str) -> tuple[float, float]:
    """One first step in a process of its own."""
    command = [sys.executable, __file__, "--here", side, "--sizes", size]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    spent, loss = map(float, output.split()[-2:])
    return spent, loss


if __name__ == "__main__":
    main()
