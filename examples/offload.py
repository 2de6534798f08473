"""Training state in the memory of the host: one model, one budget of device memory, and plans that fit it or not.

    python examples/offload.py [--layers 8] [--width 256] [--steps 3]

Each plan trains the same network with bfloat16 parameters and float32 masters on simulated ranks. The budget is
55 % of what the first plan needs. All plans that run have the same losses, bit for bit.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import functional_parallel as fp
from sharding_specs import Mesh

MIB = 1 << 20
PRECISION = fp.mixed_precision("bf16", reduce="bf16")


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["w"])
    return ((x - y) ** 2).mean()


def plans() -> dict[str, Any]:
    return {
        "ZeRO-2": fp.chain(PRECISION, fp.zero(2, "data")),
        "ZeRO-2, state on the host": fp.chain(PRECISION, fp.zero(2, "data"), fp.offload(state="host")),
        "ZeRO-2, half of it": fp.chain(PRECISION, fp.zero(2, "data"), fp.offload(state="host", fraction=0.5)),
        "ZeRO-3, state on the host": fp.chain(PRECISION, fp.zero(3, "data"), fp.offload(state="host")),
        "ZeRO-3, parameters too": fp.chain(PRECISION, fp.zero(3, "data"), fp.offload(state="host", parameters="host")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    torch.manual_seed(0)
    params = {"layers": [{"w": torch.randn(given.width, given.width) / 16} for _ in range(given.layers)]}
    batch, mesh = torch.randn(2, given.batch, given.width), Mesh(data=2)
    count = given.layers * given.width**2
    print(f"{count:,} parameters on {mesh}; MiB per rank, predicted before the step runs\n")
    print(f"{'plan':28}  {'device':>7}  {'host':>7}  {'down':>6}  {'up':>6}  loss after {given.steps} steps")
    budget, losses = 0, set()
    for name, plan in plans().items():
        train = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, plan)
        state = train.init(params)
        program = train.lower(state, *batch)
        peaks, moved = program.memory().peaks, program.bytes_moved()
        budget = budget or peaks["device"] * 11 // 20
        for _ in range(given.steps):
            state, metrics = train(state, *batch)
        losses.add(metrics.loss.item())
        cells = (
            peaks["device"],
            peaks.get("host", 0),
            moved.get(("device", "host"), 0),
            moved.get(("host", "device"), 0),
        )
        text = "  ".join(f"{size / MIB:{width}.2f}" for size, width in zip(cells, (7, 7, 6, 6), strict=True))
        print(f"{name:28}  {text}  {metrics.loss.item():.9f}")
    assert len(losses) == 1, losses
    print(f"\nwith a budget of fp.Memory(device={budget}), 55 % of what the first plan needs:")
    for name, plan in plans().items():
        train = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, plan, memory=fp.Memory(device=budget))
        try:
            train.lower(params, *batch)
            print(f"  {name}: fits")
        except fp.BudgetError as error:
            print(f"  {name}: {str(error).partition('. ')[0].partition(': ')[2]}")


if __name__ == "__main__":
    main()
