"""Request to scale the loss, skip steps with overflow, and keep the scale in the state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import optree
import torch

from ..functions import Layout, PyTree
from .loss_scaling import LossScale, LossScaleState
from .state_request import StateRequest, Update

__all__ = ["ScaleLoss", "ScaledState"]


class ScaledState(NamedTuple):
    """Optimizer state together with the loss scale's state. Both are saved, loaded and sharded as one tree."""

    optimizer: PyTree
    loss_scale: LossScaleState


@dataclass(frozen=True)
class ScaleLoss(StateRequest):
    """Request to multiply the loss by a scale, and to skip the update of a step with overflow."""

    rules: LossScale
    tree: ClassVar[type[ScaledState]] = ScaledState
    may_skip: ClassVar[bool] = True

    def init(self, params: PyTree, layout: Layout) -> LossScaleState:
        return self.rules.init()

    def loss(self, value: torch.Tensor, leaves: LossScaleState) -> torch.Tensor:
        return value.float() * leaves.scale.float()

    def gradients(self, gradients: PyTree, leaves: LossScaleState) -> PyTree:
        def unscaled(gradient: torch.Tensor) -> torch.Tensor:
            wide = gradient.float() if gradient.dtype.itemsize < 4 else gradient  # float16 does not hold 2 ** 16
            return (wide / leaves.scale.to(wide.dtype)).to(gradient.dtype)

        return optree.tree_map(unscaled, gradients)  # None stays None

    def updated(self, update: Update, leaves: LossScaleState) -> tuple[Update, LossScaleState]:
        overflow = _overflow(update.norm)
        params = _select(overflow, update.old_params, update.params)
        state = _select(overflow, update.old_state, update.state)
        return replace(update, params=params, state=state), self.rules.update(leaves, overflow)

    def metrics(self, norm: torch.Tensor | None, leaves: LossScaleState) -> dict[str, Any]:
        return {"skipped": _overflow(norm), "loss_scale": leaves.scale}

    def check(self, leaves: LossScaleState) -> None:
        self.rules.check(leaves)

    def __str__(self) -> str:
        return f"loss scaled from {self.rules.initial:g}"


def _overflow(norm: torch.Tensor | None) -> torch.Tensor:
    assert norm is not None  # a step that may be skipped computes it
    return ~torch.isfinite(norm)  # a sum over all ranks, so all of them agree


def _select(condition: torch.Tensor, old: PyTree, new: PyTree) -> PyTree:
    def one(a: PyTree, b: PyTree) -> PyTree:
        return torch.where(condition, a, b) if isinstance(b, torch.Tensor) else b

    return optree.tree_map(one, old, new)
