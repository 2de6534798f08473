"""Training steps of one model on many meshes and plans, for checkpoints that go from one to another."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import optree
import torch

import functional_parallel as fp
from sharding_specs import Mesh, P

__all__ = ["ALONE", "BATCH", "PARAMS", "PLANS", "averaged", "loss", "same", "train_of"]

Params = dict[str, Any]


def _pipe(schedule: str) -> Any:
    return fp.pipeline("pipe", {"layers/*": P("pipe")}, schedule=schedule, microbatches=4)


_TENSOR = fp.tensor_parallel("tensor", {"*/w": P(None, None, "tensor"), "*/b": P(None, "tensor"), "head": P("tensor")})
PLANS: dict[str, tuple[Mesh, Any]] = {
    "one device": (Mesh(data=1), None),
    "data parallel": (Mesh(data=2), fp.data_parallel("data")),
    "master": (Mesh(data=2), fp.data_parallel("data", master=1)),
    "zero 1": (Mesh(data=4), fp.zero(1, "data")),
    "zero 1, flat": (Mesh(data=4), fp.zero(1, "data", layout="flat")),
    "zero 2, flat, tensor": (Mesh(data=2, tensor=2), fp.chain(_TENSOR, fp.zero(2, "data", layout="flat"))),
    "zero 3, tensor": (Mesh(data=2, tensor=2), fp.chain(_TENSOR, fp.zero(3, "data"))),
    "zero 3, padded": (Mesh(data=3), fp.zero(3, "data")),
    "masters, zero 1": (Mesh(data=2), fp.chain(fp.mixed_precision("bf16"), fp.zero(1, "data"))),
    "masters, flat, loss scale": (
        Mesh(data=2),
        fp.chain(fp.mixed_precision("fp16"), fp.zero(2, "data", layout="flat")),
    ),
    "pipeline": (Mesh(pipe=2), _pipe("1f1b")),
    "pipeline of four": (Mesh(pipe=4), _pipe("gpipe")),
    "interleaved, zero 3": (Mesh(pipe=2, data=2), fp.chain(fp.zero(3, "data"), _pipe("interleaved"))),
}
ALONE: dict[str, tuple[Mesh, Any]] = {  # their states are restored onto their own plan only
    "local SGD": (Mesh(data=2), fp.local_sgd("data", inner=2)),
    "DiLoCo": (Mesh(data=2), fp.diloco("data", inner=2)),
    "PipeDream": (Mesh(pipe=2), _pipe("pipedream")),
}
BATCH = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))


def params() -> Params:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator) / 2  # noqa: E731
    return {"layers": {"w": draw(4, 8, 8), "b": draw(4, 8)}, "head": draw(8, 5), "empty": torch.zeros(0, 8)}


PARAMS = params()


def loss(p: Params, x: torch.Tensor) -> torch.Tensor:
    for w, b in zip(p["layers"]["w"], p["layers"]["b"], strict=True):
        x = torch.tanh(x @ w + b)
    return ((x @ p["head"]) ** 2).mean() + p["empty"].sum()


def train_of(name: str, **options: Any) -> Any:
    """A training step on one of the meshes and plans."""
    mesh, plan = (PLANS | ALONE)[name]
    clip = {"clip": 1.0} if name in PLANS else {}
    return fp.train_step(loss, fp.optim.adamw(0.01), mesh, plan, **clip | options)


@cache
def trained(name: str) -> tuple[Any, Any]:
    """A training step, and its state after one step."""
    train = train_of(name, donate=False)
    return train, train(train.init(PARAMS), BATCH)[0]


class Averaged(NamedTuple):
    inner: Any
    average: Any  # like params


def averaged(optimizer: Any) -> Any:
    """An optimizer whose state also has an average of the parameters, which begins as a copy of them."""

    def init(params: Any) -> Averaged:
        return Averaged(optimizer.init(params), optree.tree_map(torch.clone, params))

    def update(gradients: Any, state: Averaged, params: Any, **own: Any) -> Any:
        new, inner = optimizer.update(gradients, state.inner, params, **own)
        return new, Averaged(inner, optree.tree_map(lambda a, p: (a + p) / 2, state.average, new))

    return optimizer._replace(init=init, update=update, lr=None)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two results of `train.whole` have the same bits, apart from the state of a loss scale."""
    ours, theirs = ((params, getattr(state, "optimizer", state)) for params, state in (ours, theirs))
    pairs = zip(optree.tree_leaves(ours), optree.tree_leaves(theirs), strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)
