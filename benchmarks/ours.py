"""Ours: the peers' module through `fp.functional`, and a plan per kind of parallelism."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from model import ADAMW, GPT, cross_entropy
from peers.pipeline import microbatches

import functional_parallel as fp
from functional_parallel.runtime import ProcessRuntime, SimulatedRuntime, use_runtime
from sharding_specs import Mesh, P

MEGATRON = {
    "tokens.weight": P("tensor", None),
    "*/attention.[qkv].weight": P("tensor", None),
    "*/attention.o.weight": P(None, "tensor"),
    "*/up.weight": P("tensor", None),
    "*/down.weight": P(None, "tensor"),
    "head.weight": P("tensor", None),
}


class Ours:
    """A training step under a plan; the same face as a peer."""

    def __init__(
        self, module: GPT, axis: str, plan: Any, schedule: str | None = None, ranks: int | None = None
    ) -> None:
        self.module = module
        model, self.params = fp.functional(module)
        self.loss, self.mesh = partial(_loss, model), Mesh(**{axis: ranks or dist.get_world_size()})
        self.plan, self.schedule = plan, schedule
        self.train: Any = None

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.train is None:
            self._begin(tokens)
        self.state, metrics = self.train(self.state, tokens)
        return metrics.loss

    def _begin(self, tokens: torch.Tensor) -> None:
        self.train = fp.train_step(self.loss, fp.optim.adamw(**ADAMW), self.mesh, self._plan(tokens))
        self.state = self.train.init(self.params, batch=tokens)
        self.module.to("meta")  # the state has parameters of its own now
        del self.module, self.params

    def _plan(self, tokens: torch.Tensor) -> Any:
        if self.schedule is None:
            return self.plan
        return fp.pipeline("pipe", schedule=self.schedule, microbatches=microbatches(len(tokens)))

    def gradients(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Whole gradients, before the first step."""
        plan = self._plan(tokens)
        gradients, _ = fp.compile(fp.grad_and_value(plan(self.loss)), self.mesh)(self.params, tokens)
        return gradients

    def leave_to_backend(self) -> None:
        """From now on collectives are the backend's, so that all pass where they are counted."""
        use_runtime(ProcessRuntime(self.mesh, algorithm="backend"))
        self.train.program.cache.clear()

    def whole(self, loss: torch.Tensor) -> float:
        return float(loss)


def _loss(model: Callable[..., torch.Tensor], params: Any, tokens: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(params, tokens[:, :-1]), tokens)


def data_parallel(module: GPT) -> Ours:
    return Ours(module, "data", fp.data_parallel("data"))


def zero(module: GPT, stage: int, keep_gathered: bool = False) -> Ours:
    return Ours(module, "data", fp.zero(stage, "data", keep_gathered=keep_gathered))


def tensor_parallel(module: GPT) -> Ours:
    return Ours(module, "tensor", fp.tensor_parallel("tensor", MEGATRON))


def sequence_parallel(module: GPT) -> Ours:
    """As above; the residual stream is sharded over time, by a constraint on each of its edges."""
    for part in (module, *module.blocks):
        part.edge = partial(fp.constrain, spec=P(None, "tensor", None))
    return tensor_parallel(module)


def pipeline(module: GPT, schedule: str) -> Ours:
    """The model is cut by itself, in as many stages as the schedule has."""
    return Ours(module, "pipe", None, schedule)


def staged(module: GPT) -> Ours:
    """On one rank alone, whatever else runs."""
    use_runtime(SimulatedRuntime(Mesh(alone=1)))
    return Ours(module, "alone", None, ranks=1)


OURS: dict[str, Callable[[GPT], Ours]] = {  # by the peer that it runs against
    "DDP": data_parallel,
    "FSDP2, resharding": partial(zero, stage=3),
    "FSDP2, keeping": partial(zero, stage=3, keep_gathered=True),
    "ZeroRedundancyOptimizer": partial(zero, stage=1),
    "DTensor TP": tensor_parallel,
    "DTensor SP": sequence_parallel,
    "GPipe": partial(pipeline, schedule="gpipe"),
    "1F1B": partial(pipeline, schedule="1f1b"),
    "interleaved 1F1B": partial(pipeline, schedule="interleaved"),
    "ZBV": partial(pipeline, schedule="zb-v"),
    "DeepSpeed ZeRO-1": partial(zero, stage=1),
    "JAX DP": data_parallel,
    "JAX TP": tensor_parallel,
}
