"""Models, plans and runs for the tests of data parallelism with a master, at the top level for processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optree
import torch
from torch import Tensor

import functional_parallel as fp
from sharding_specs import Mesh

from ..laws.random_functions import STEPS, Program, arguments

__all__ = [
    "OPTIMIZERS",
    "Marked",
    "around_a_step",
    "batch",
    "loss",
    "marked_loss",
    "on_processes",
    "parameters",
    "trained",
]

OPTIMIZERS = {
    "sgd": lambda: fp.optim.sgd(0.125),
    "momentum": lambda: fp.optim.sgd(0.1, momentum=0.9),
    "adam": lambda: fp.optim.adam(1e-2),
    "adamw": lambda: fp.optim.adamw(1e-2, weight_decay=0.1),
    "lion": lambda: fp.optim.lion(1e-2),
    "adafactor": lambda: fp.optim.adafactor(1e-2),
    "lamb": lambda: fp.optim.lamb(1e-2),
    "by path": lambda: fp.optim.by_path(
        {"bias": fp.optim.adagrad(1e-2), "*": fp.optim.muon(1e-2, dtype=torch.float64)}
    ),
}


@dataclass(frozen=True)
class Marked:
    """A random function that marks one of its values as the model's output."""

    program: Program
    at: int

    def __call__(self, params: dict[str, Tensor], x: Tensor) -> Tensor:
        values = [x]
        for index, (name, source, weight) in enumerate(self.program.steps):
            found = STEPS[name](values[source % len(values)], params[f"w{weight % len(params)}"]).clamp(-4, 4)
            values.append(fp.outputs(found) if index == self.at % len(self.program.steps) else found)
        return sum((value * (index + 1)).sum() for index, value in enumerate(values))  # type: ignore[return-value]


def parameters(seed: int = 0, width: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"w": (width, width), "bias": (width,), "v": (width, 3)}
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def batch(rows: int, seed: int = 0, width: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    x, y = torch.randn(rows, width, generator=generator), torch.randn(rows, 3, generator=generator)
    return x.double(), y.double()


def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return ((torch.tanh(x @ params["w"] + params["bias"]) @ params["v"] - y) ** 2).mean()


def marked_loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    found = fp.outputs(torch.tanh(x @ params["w"] + params["bias"]) @ params["v"])
    return ((found - y) ** 2).mean() + params["v"].square().sum() / 8


def trained(f: Any, optimizer: str, plan: Any, mesh: Mesh, rows: int, **options: Any) -> Any:
    """Parameters, optimizer state and metrics of three steps."""
    train = fp.train_step(f, OPTIMIZERS[optimizer](), mesh, plan, reduction="ordered", **options)
    state, found = train.init(parameters()), []
    for step in range(3):
        state, metrics = train(state, *batch(rows, step))
        found.append((metrics.loss, metrics.grad_norm))
    return train.whole(state), found


def around_a_step(rank: int, ranks: int, master: int) -> Any:
    """The calls of a run beside its steps, as text or numbers, and whether this rank holds the state."""
    mesh, plan = Mesh(data=ranks), fp.data_parallel("data", master=master)
    train = fp.train_step(loss, fp.optim.adamw(1e-2), mesh, plan, donate=False)
    state, _ = train(train.init(parameters), *batch(2 * ranks))
    predict = train.compile(plan(lambda params, x: torch.tanh(x @ params["w"] + params["bias"])))
    found = [predict(state, batch(2 * ranks + 1)[0]), train.params(train.copy(state)), train.whole(state)]
    found.append(train.whole(train.load(*train.whole(state), 1)))
    assert train.replay(state, *batch(2 * ranks)) is None
    bad = batch(2 * ranks)[0], batch(2 * ranks)[1].fill_(1e200)  # whose square overflows
    try:
        train(state, *bad)
    except fp.NonFiniteError as error:
        origin = train.replay(state, *bad)
        told = (error.parameter, None if origin is None else origin.op)
    held = [handle.is_meta for handle in state.handles if isinstance(handle, Tensor)]
    return optree.tree_leaves(found), told, held


def on_processes(rank: int, ranks: int, master: int) -> Any:
    """All that a rank of a run on processes sees: gradients, steps and random functions, even and uneven."""
    mesh, plan = Mesh(data=ranks), fp.data_parallel("data", master=master)
    steps = ("product", 0, 0), ("column sum", 1, 1), ("relu", 2, 0), ("row maximum", 1, 2)
    return optree.tree_leaves(
        [
            fp.compile(fp.grad_and_value(plan(Marked(Program(steps), at))), mesh)(*arguments(3, rows=rows))
            for at in (1, 3)
            for rows in (2 * ranks, 2 * ranks + 1)
        ]
        + [
            trained(loss, "adamw", plan, mesh, 2 * ranks, clip=0.5),
            trained(marked_loss, "momentum", plan, mesh, 2 * ranks + 1),
        ]
    )
