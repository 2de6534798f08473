"""ZeRO by example: three layers on three ranks, then the four stages side by side.

    python examples/zero_stages.py [--plot runs/zero_stages.png]

First who holds what, and what is sent when, with ZeRO-3 on a network of three layers and three ranks. Then one loss and
four plans that differ in one number, with what each rank keeps between steps and sends during one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import functional_parallel as fp
from functional_parallel.ir import info
from sharding_specs import Mesh

WIDTH, BATCH = 6, 12
NAMES = {"0/0/": "parameter ", "0/1/1/": "mean of gradients ", "0/1/2/": "mean of squares ", "1/": "batch "}


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = torch.tanh(x @ layer["weight"])
    return ((x - y) ** 2).mean()


def network(layers: int, width: int) -> Any:
    torch.manual_seed(0)
    return {"layers": [{"weight": torch.randn(width, width) / width**0.5} for _ in range(layers)]}


def who_holds_what(mesh: Mesh) -> None:
    params, batch = network(3, WIDTH), torch.randn(2, BATCH, WIDTH)
    train = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, fp.zero(3, "data"), bucket=None)
    program = train.lower(train.init(params), *batch)
    print(f"ZeRO-3, three layers of {WIDTH} × {WIDTH} on {mesh}\n\nat rest, on each rank:")
    for path, spec, node in zip(program.in_paths, program.in_specs, program.traced.inputs, strict=True):
        shape = info(node).aval.shape
        for prefix, name in NAMES.items():
            path = name + path.removeprefix(prefix) if path.startswith(prefix) else path
        held = "a third of it" if spec.axes else "all of it"
        if shape:
            print(f"  {path:38} {tuple(shape)!s:8} {held}")
    print("\nduring a step:")
    for one in program.collectives():
        print(f"  {one.phase:8}  {one.kind:12}  {one.operand!s:10} → {one.result!s:10}  {one.source or ''}")


def four_stages(mesh: Mesh, plot: Path) -> None:
    params, batch = network(8, 128), torch.randn(2, 4 * BATCH, 128)
    rows = []
    for stage in range(4):
        plan = fp.zero(stage, "data")  # the line that differs
        train = fp.train_step(loss, fp.optim.adamw(1e-3), mesh, plan)
        state = train.init(params)
        for _ in range(3):
            state, metrics = train(state, *batch)
        kept = fp.estimate(params, mesh, plan, optimizer=fp.optim.adamw(1e-3))
        sent = sum(train.program.bytes_sent().values())
        rows.append((stage, kept, sent, float(metrics.loss)))
    print(f"\n\nEight layers of 128 × 128 on {mesh}, float32, AdamW; KiB per rank\n")
    print("stage  parameters  gradients  optimizer  together  sent per step  loss after 3 steps")
    for stage, kept, sent, value in rows:
        parts = (kept.parameters, kept.gradients, kept.optimizer, kept.total)
        cells = "  ".join(f"{part / 1024:{width}.1f}" for part, width in zip(parts, (10, 9, 9, 8), strict=True))
        print(f"{stage:5}  {cells}  {sent / 1024:13.1f}  {value:18.6f}")
    draw(rows, plot)


def draw(rows: list[Any], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("\n(no plot: matplotlib is not installed)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    bottom = [0.0] * len(rows)
    for part in ("parameters", "gradients", "optimizer"):
        sizes = [getattr(kept, part) / 1024 for _, kept, _, _ in rows]
        axes.bar([f"ZeRO-{stage}" for stage, *_ in rows], sizes, bottom=bottom, label=part)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    axes.set_ylabel("KiB kept per rank")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"\nplot: {path}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, default=Path("runs/zero_stages.png"))
    options = parser.parse_args()
    who_holds_what(Mesh(data=3))
    four_stages(Mesh(data=4), options.plot)
