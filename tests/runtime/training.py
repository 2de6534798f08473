"""A training script as users write it: plain `python` simulates the ranks, `torchrun` gives each a process.

Its arguments are the sizes of the mesh, over data and tensor.

It prints the loss of every step to all its digits, once, and each process that its group is let go at the end.
"""

from __future__ import annotations

import atexit
import sys

import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh, P
from tests.runtime.launched import write


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    hidden = fp.random.dropout(torch.tanh(x @ params["w1"]), 0.2)
    return ((hidden @ params["w2"] - y) ** 2).mean()


def main(data: int, tensor: int) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    plan = fp.chain(
        fp.tensor_parallel("tensor", {"w1": P(None, "tensor"), "w2": P("tensor", None)}),
        fp.zero(3, "data"),
    )
    train = fp.train_step(loss, fp.optim.adamw(0.05), Mesh(data=data, tensor=tensor), plan, clip=1.0, seed=0)
    state = train.init({"w1": draw(4, 8), "w2": draw(8, 2)})
    for _ in range(5):
        state, metrics = train(state, draw(8, 4), draw(8, 2))
        if fp.is_main_rank():
            write(f"loss {metrics.loss.item():.17g}")


if __name__ == "__main__":
    atexit.register(lambda: write(f"groups at the end: {torch.distributed.is_initialized()}"))
    main(*map(int, sys.argv[1:]))
