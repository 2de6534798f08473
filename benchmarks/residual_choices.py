"""What a budget chooses for GPT-2's activations on a machine: the choice, its cost, a lower bound, and the gap.

    python benchmarks/residual_choices.py --hardware h100 --batch 16

The program is lowered and priced, not run.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import model
import torch

import functional_parallel as fp
from sharding_specs import Mesh

PLANS = {"recomputation": (), "recomputation and moves": (fp.offload(activations="host"),)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--embed", type=int, default=768)
    parser.add_argument("--time", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--hardware", default="h100")
    args = parser.parse_args()
    config = model.Config("GPT-2", args.layers, args.embed, args.embed // 64, args.time, args.batch, vocab=50304)
    fn, params = fp.functional(model.make(config))
    tokens = model.batch(config, 0)

    def loss(params: Any, tokens: torch.Tensor) -> torch.Tensor:
        return model.cross_entropy(fn(params, tokens[:, :-1]), tokens)

    def program(remat: Any, *rest: Any) -> Any:
        plan = fp.chain(fp.mixed_precision("bf16"), remat, fp.data_parallel("data"), *rest)
        return fp.compile(fp.grad_and_value(plan(loss)), Mesh(data=1)).lower(params, tokens)

    peak = program(fp.remat(where="none")).memory().peak
    for allowed, rest in PLANS.items():
        for part in (95, 90, 85, 80):
            began = time.process_time()
            try:
                (note, *_) = program(fp.remat(budget=peak * part // 100, hardware=args.hardware), *rest).notes
            except fp.BudgetError as error:
                note = str(error).split(" Alive there")[0]
            print(f"{allowed}, {part} % of the peak ({time.process_time() - began:.0f} s to lower)\n{note}")


if __name__ == "__main__":
    main()
