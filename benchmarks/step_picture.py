"""Draw one step of ZeRO-Infinity over time, as a price predicts it, for docs/memory_tiers.md.

    python benchmarks/step_picture.py [--out docs/zero_infinity_step.png] [--hardware h100]

No machine is needed, and nothing is computed: parameters and batch are on the meta device.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

import functional_parallel as fp
from sharding_specs import Mesh

LAYERS, WIDTH, TOKENS, RANKS = 4, 4096, 16384, 64
OUT = Path(__file__).parent.parent / "docs" / "zero_infinity_step.png"


def loss(params: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    for layer in params["layers"]:
        x = x + torch.tanh(x @ layer["up"]) @ layer["down"]
    return x.square().mean()


def program(folder: str) -> fp.Program:
    """The step of a network whose parameters, masters and moments are on disk."""
    with torch.device("meta"):
        layers = [{"up": torch.empty(WIDTH, 4 * WIDTH), "down": torch.empty(4 * WIDTH, WIDTH)} for _ in range(LAYERS)]
        x = torch.empty(RANKS * TOKENS, WIDTH)
    plan = fp.chain(
        fp.remat(),
        fp.mixed_precision("bf16", reduce="bf16"),
        fp.zero(3, "data"),
        fp.offload(state="disk", parameters="disk", path=folder, group="24MiB"),
    )
    found = fp.train_step(loss, fp.optim.adamw(1e-3), Mesh(data=RANKS), plan).lower({"layers": layers}, x)
    assert isinstance(found, fp.Program)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--hardware", default="h100")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        price = program(folder).price(given.hardware)
    price.draw(given.out)
    print(price)


if __name__ == "__main__":
    main()
