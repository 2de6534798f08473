"""A rank's own computation: a gradient and a loss, or several inner steps and the difference that they made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import optree
import torch

from sharding_specs import Mesh, P, register_dataclasses

from ..compile import compile as compiled
from ..functions import LocalFunction, PyTree, as_local_function, grad_and_value
from ..ir import is_trained
from ..optim import Optimizer
from ..runtime import SimulatedRuntime, use_runtime

_ALONE = Mesh(asynchronous_rank=1)


@dataclass(frozen=True)
class Work:
    params: PyTree
    version: int  # number of updates before these weights
    begun: PyTree  # the weights that the last exchange returned
    optimizer: PyTree  # state of the optimizer of the inner steps
    steps: int = 0
    waited: float = 0.0  # seconds that it waited for the weights

    def given(self, params: PyTree, version: int, waited: float) -> Work:
        return replace(self, params=params, version=version, begun=params, waited=waited)


class Computation:
    """Programs of one rank. With an outer optimizer, `optimizer` makes the `inner` steps between two pushes."""

    def __init__(
        self, loss: Callable[..., Any], optimizer: Optimizer, outer: Optimizer | None, inner: int, adds: bool
    ) -> None:
        use_runtime(SimulatedRuntime(_ALONE))
        local = loss if isinstance(loss, LocalFunction) else as_local_function(loss)
        self.gradient = compiled(grad_and_value(local), _ALONE, name="gradient")
        self.optimizer, self.outer, self.inner, self.adds = optimizer, outer, inner, adds
        self.step = _update(optimizer)
        self.servers = optimizer if outer is None else outer
        self.update = self.step if outer is None else _update(outer)

    def begin(self, params: PyTree) -> Work:
        return Work(params, 0, params, None if self.outer is None else self.optimizer.init(params))

    def take(self, work: Work, batch: tuple[PyTree, ...]) -> tuple[Work, torch.Tensor, PyTree, float]:
        """Return the state after a step, its loss, what to push (None after an inner step), and its weight."""
        register_dataclasses(batch)
        gradients, loss = self.gradient(work.params, *batch)
        work = replace(work, steps=work.steps + 1)
        if self.outer is None:
            return work, loss, gradients, 1.0 if self.adds else _samples(batch)
        params, optimizer = self.step(gradients, work.optimizer, work.params)
        work = replace(work, params=params, optimizer=optimizer)
        if work.steps % self.inner:
            return work, loss, None, 1.0
        made = optree.tree_map(lambda begun, now: begun - now if is_trained(begun) else None, work.begun, params)
        return work, loss, made, 1.0

    def warm(self, params: PyTree) -> None:
        """Trace the server's update, so that no thread traces later."""
        zeros = optree.tree_map(lambda leaf: torch.zeros_like(leaf) if is_trained(leaf) else None, params)
        self.update(zeros, self.servers.init(params), params)


def _update(optimizer: Optimizer) -> Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]:
    def update(gradients: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        specs = () if getattr(optimizer, "specs", None) is None else (P(),)  # a user's own pair may lack it
        return optimizer.update(gradients, state, params, *specs)

    return compiled(update, _ALONE, in_specs=(P(), P(), P()), out_specs=P(), name="update")


def _samples(batch: tuple[PyTree, ...]) -> float:
    sizes = (leaf.shape[0] for leaf in optree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
    return float(next(sizes, 1))
