"""Lion, the sign of an interpolated momentum (Chen et al., arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from ..functions import explain_keywords
from .decay import Decay, decay_rates
from .hyperparameters import require_betas, require_not_negative, require_rate
from .optimizer import Optimizer, Schedule, learning_rate, map_leaves, mark_elementwise, zeros_like

__all__ = ["LionState", "lion"]


class LionState(NamedTuple):
    """State of `lion`, half the size of Adam's."""

    step: torch.Tensor  # () number of updates done
    mean: Any  # like params: moving average of gradients


@explain_keywords
def lion(
    lr: Schedule, *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0, decay: Decay = None
) -> Optimizer:
    """p ← p (1 − lr λ) − lr · sign(β₁ m + (1−β₁) g);  m ← β₂ m + (1−β₂) g.

    The real and the imaginary part of a complex parameter are updated separately, each by its sign.

    >>> import torch
    >>> optimizer = lion(0.25)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.update({"w": torch.tensor([3.0, -0.1])}, optimizer.init(params), params)[0]
    {'w': tensor([0.7500, 1.2500])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate. Use a third to a
            tenth of AdamW's.
        betas: β₁ for the step, β₂ for the average.
        weight_decay: λ, decoupled from the gradient.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Raises:
        ValueError: for a number that is out of range.
    """
    require_rate("lion", lr)
    require_betas("lion", betas)
    require_not_negative("lion", weight_decay=weight_decay)
    beta1, beta2 = betas

    rates = partial(decay_rates, weight_decay, decay)

    def init(params: Any) -> LionState:
        rates(params)  # raises for a pattern that matches nothing
        return LionState(torch.zeros(()), zeros_like(params))

    @mark_elementwise
    def update(grads: Any, state: LionState, params: Any, constants: Any = None) -> tuple[Any, LionState]:
        rate = learning_rate(lr, state.step)

        def one(p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, rate_of_decay: float) -> tuple[torch.Tensor, ...]:
            lr_p = rate.to(p.dtype)
            direction = torch.sign(beta1 * m + (1 - beta1) * g)
            return p * (1 - lr_p * rate_of_decay) - lr_p * direction, beta2 * m + (1 - beta2) * g

        constants = rates(params) if constants is None else constants
        new, mean = map_leaves(one, params, grads, state.mean, constants=constants)
        return new, LionState(state.step + 1, mean)

    return Optimizer(init, update, constants=rates)
