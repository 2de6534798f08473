"""Loss scaling in a training step: scale the loss, unscale the gradients, and extend the state."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch

from sharding_specs import P, broadcast_specs

from ...functions import LocalFunction, PyTree, SpecTree
from ...transforms import LossScale, LossScaleState

__all__ = ["ScaledState", "scaled_loss", "scaled_specs", "select_unless", "unscaled", "with_scale"]


class ScaledState(NamedTuple):
    """Optimizer state together with the loss scale's state. Both are saved, loaded and sharded as one tree."""

    optimizer: PyTree
    loss_scale: LossScaleState


def with_scale(state: PyTree, rules: LossScale | None) -> PyTree:
    """Convert a saved optimizer state to the state of a step with the loss scale `rules`.

    If the saved state has no loss scale, the scale starts at its initial value. If `rules` is None, it is dropped.
    """
    if rules is None:
        return state.optimizer if isinstance(state, ScaledState) else state
    return state if isinstance(state, ScaledState) else ScaledState(state, rules.init())


def scaled_specs(specs: SpecTree, state: PyTree) -> SpecTree:
    """Return the specs of `state`: `specs` for the optimizer state, replicated for the loss scale."""
    if not isinstance(state, ScaledState):
        return specs
    return ScaledState(specs, broadcast_specs(P(), state.loss_scale))


def scaled_loss(f: LocalFunction, scale: torch.Tensor, has_aux: bool) -> LocalFunction:
    """Return a function of the loss times the scale. Its aux is the result of `f`: the unscaled loss and any aux."""

    def call(*args: PyTree) -> tuple[Any, SpecTree]:
        result = f.run(*args)
        value = result[0] if has_aux else result
        return (value.float() * scale.float(), result), (P(), f.results)

    return LocalFunction(call, f.layout, f.name)


def unscaled(gradients: PyTree, scale: torch.Tensor) -> PyTree:
    """Divide gradients by the scale of the loss and keep their dtype. None stays None."""

    def one(gradient: torch.Tensor) -> torch.Tensor:
        wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient  # float16 does not hold 2 ** 16
        return (wide / scale.to(wide.dtype)).to(gradient.dtype)

    return optree.tree_map(one, gradients)


def select_unless(skip: torch.Tensor, new: PyTree, old: PyTree) -> PyTree:
    """Return the old values if the step is skipped, else the new ones."""
    return optree.tree_map(lambda a, b: torch.where(skip, b, a) if isinstance(a, torch.Tensor) else a, new, old)
