"""What `fp.prepare` compares per call, as a share of a tiny step of a module with 85 submodules.

python benchmarks/compared_habits.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import functional_parallel as fp
from sharding_specs import Mesh


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="steps and comparisons, in turn")
    rounds = parser.parse_args().rounds
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU()) for _ in range(14)]
    net, x = nn.Sequential(*blocks), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    step = fp.prepare(net, optimizer, loss=lambda model, x: model(x).square().mean(), mesh=Mesh())
    step(x)
    (program,) = [each for cache in step.train.programs.compiled._lowered.values() for each in cache._found.values()]

    def compare() -> None:
        step._follow()
        assert all(each.holds() for each in program[0].assumptions)

    times: dict[str, list[float]] = {"step": [], "comparison": []}
    for _ in range(rounds):
        for name, call in (("step", lambda: step(x)), ("comparison", compare)):
            begin = time.perf_counter()
            call()
            times[name].append(1e6 * (time.perf_counter() - begin))
    for name, each in times.items():
        low, middle, high = statistics.quantiles(each, n=4)
        print(f"{name:10} {middle:8.0f} µs  ({low:.0f} – {high:.0f})")
    print(f"comparison ÷ step {statistics.median(times['comparison']) / statistics.median(times['step']):.1%}")


if __name__ == "__main__":
    main()
