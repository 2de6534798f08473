"""What a loss scale changes in a training step: the loss on its way in, gradients on their way out, and the state."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch

from sharding_specs import P, broadcast_specs

from ...functions import LocalFunction, PyTree, SpecTree
from ...transforms import LossScale, LossScaleState

__all__ = ["ScaledState", "scaled_loss", "scaled_specs", "select_unless", "unscaled", "with_scale"]


class ScaledState(NamedTuple):
    """An optimizer's state with a loss scale's beside it: saved, loaded and sharded as one."""

    optimizer: PyTree
    loss_scale: LossScaleState


def with_scale(state: PyTree, rules: LossScale | None) -> PyTree:
    """An optimizer's state as a step with these rules keeps it, whichever step saved it: a scale starts afresh."""
    if rules is None:
        return state.optimizer if isinstance(state, ScaledState) else state
    return state if isinstance(state, ScaledState) else ScaledState(state, rules.init())


def scaled_specs(specs: SpecTree, state: PyTree) -> SpecTree:
    """How a state lies: the optimizer's as its specs say, the scale whole on every rank."""
    if not isinstance(state, ScaledState):
        return specs
    return ScaledState(specs, broadcast_specs(P(), state.loss_scale))


def scaled_loss(f: LocalFunction, scale: torch.Tensor, has_aux: bool) -> LocalFunction:
    """The loss times the scale; beside it, as its aux, the loss itself and what it had beside it."""

    def call(*args: PyTree) -> tuple[Any, SpecTree]:
        result = f.run(*args)
        value = result[0] if has_aux else result
        return (value.float() * scale.float(), result), (P(), f.results)

    return LocalFunction(call, f.layout, f.name)


def unscaled(gradients: PyTree, scale: torch.Tensor) -> PyTree:
    """Gradients without the scale that the forward used, in the type of the parameters; None stays."""

    def one(gradient: torch.Tensor) -> torch.Tensor:
        wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient  # float16 does not hold 2 ** 16
        return (wide / scale.to(wide.dtype)).to(gradient.dtype)

    return optree.tree_map(one, gradients)


def select_unless(skip: torch.Tensor, new: PyTree, old: PyTree) -> PyTree:
    """The new values; the old ones where a step is skipped."""
    return optree.tree_map(lambda a, b: torch.where(skip, b, a) if isinstance(a, torch.Tensor) else a, new, old)
