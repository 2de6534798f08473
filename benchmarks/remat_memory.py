"""What recomputation saves and costs: a 24-layer GPT, one rank, one gradient step under each policy.

    python benchmarks/remat_memory.py --rounds 8 --write

Memory is predicted (`program.memory()`) and, with `--measure`, held against a tracker of live storages while the step
runs. Time is processor time on one thread, all policies in turn, in changing order; each is divided by the time without
recomputation in the same round. Attention is computed op by op, so that there is something to select; `--fused` uses
one kernel, which keeps no probabilities.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import model
import report
import torch

import functional_parallel as fp
from functional_parallel.ir import info
from functional_parallel.program.memory import StorageTable
from functional_parallel.quantities import readable_bytes
from functional_parallel.testing.tracker import tracked
from sharding_specs import Mesh

PAGE = Path(__file__).parent.parent / "docs" / "memory.md"
HEAD = ("recomputed", "kept for the backward", "peak", "ops again", "products again", "time", "quartiles")
NONE = "nothing"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--embed", type=int, default=128)
    parser.add_argument("--time", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--measure", action="store_true", help="also watch the storages of a run")
    parser.add_argument("--write", action="store_true", help="put the table into docs/memory.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = model.Config("deep", args.layers, args.embed, time=args.time, batch=args.batch, fused=args.fused)
    steps = {name: Step(config, plan) for name, plan in plans(config).items()}
    if args.measure:
        for name, step in steps.items():
            print(f"{name}: predicted {step.memory.peak}, measured {step.measured()}")
    table = report.table(HEAD, rows(steps, args.rounds))
    print(table)
    if args.write:
        report.write("remat", table, PAGE)


class Step:
    """The gradient of the model's loss under one policy, and nothing computed again besides."""

    def __init__(self, config: model.Config, plan: Any) -> None:
        fn, self.params = fp.functional(model.make(config))
        self.tokens = model.batch(config, 0)

        def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
            return model.cross_entropy(fn(params, tokens[:, :-1]), tokens)

        f = fp.grad_and_value(fp.chain(plan, fp.data_parallel("data"))(loss))
        self.run = fp.compile(f, Mesh(data=1), without=("cheap ops again",))
        self.program = self.run.lower(self.params, self.tokens)
        self.memory = self.program.memory()

    def seconds(self) -> float:
        began = time.process_time()
        self.run(self.params, self.tokens)
        return time.process_time() - began

    def measured(self) -> int:
        with torch.no_grad(), tracked((self.params, self.tokens, self.program.traced.constants)) as tracker:
            self.run(self.params, self.tokens)
        return tracker.peak

    def kept(self) -> int:
        """Bytes of storages that the forward makes and the backward takes."""
        ledger, found = StorageTable("", self.program.traced), set()
        for node in self.program.traced.nodes:
            if not info(node).backward and any(user.op != "output" and info(user).backward for user in node.users):
                found.update(storage for storage in ledger.storages[node] if storage[0].op == "call_function")
        return sum(ledger.sizes[storage] for storage in found)

    def again(self) -> tuple[int, int]:
        copies = [node for node in self.program.traced.nodes if info(node).recomputed]
        products = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return len(copies), sum(node.target in products for node in copies)


def plans(config: model.Config) -> dict[str, Any]:
    peak = Step(config, fp.remat(where="none")).memory.peak
    return {
        NONE: fp.remat(where="none"),
        "attention cores": fp.remat("attention"),
        "each layer": fp.remat(),
        "runs of 5 layers": fp.remat(every=5),
        **{f"for {part} % of the peak": fp.remat(budget=peak * part // 100) for part in (75, 50, 25)},
    }


def rows(steps: dict[str, Step], rounds: int) -> list[tuple[object, ...]]:
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-1, rounds):  # one round to warm up
        for name in names[number % len(names) :] + names[: number % len(names)]:
            spent = steps[name].seconds()
            if number >= 0:
                seconds[name].append(spent)
    found = []
    for name, step in steps.items():
        ratios = [own / plain for own, plain in zip(seconds[name], seconds[NONE], strict=True)]
        low, high = report.spread(ratios)
        sizes = (readable_bytes(step.kept()), readable_bytes(step.memory.peak))
        found.append((name, *sizes, *step.again(), f"{statistics.median(ratios):.2f}", f"{low:.2f} – {high:.2f}"))
    return found


if __name__ == "__main__":
    main()
