"""AdamW (Loshchilov & Hutter, arXiv 1711.05101), as `torch.optim.AdamW` defines it, with torch's fused kernel."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from ..functions import explain_keywords
from ..ops import adamw_of_one
from .decay import Decay, decay_rates
from .hyperparameters import require_betas, require_not_negative, require_rate
from .optimizer import Optimizer, Schedule, learning_rate, map_leaves, mark_elementwise, zeros_like

__all__ = ["AdamWState", "adamw"]


class AdamWState(NamedTuple):
    """State of `adamw`."""

    step: torch.Tensor  # () number of updates done
    mean: Any  # like params: moving average of gradients
    square: Any  # like params: moving average of their squares


@explain_keywords
def adamw(
    lr: Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay: Decay = None,
) -> Optimizer:
    """m ← β₁ m + (1−β₁) g;  v ← β₂ v + (1−β₂) g²;  p ← p (1 − lr λ) − lr m̂ / (√v̂ + ε).

    >>> import torch
    >>> optimizer = adamw(0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([2.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.9000])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate.
        betas: β₁ and β₂.
        eps: ε, outside the root.
        weight_decay: λ, decoupled from the gradient.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Raises:
        ValueError: for a number that is out of range.
    """
    require_rate("adamw", lr)
    require_betas("adamw", betas)
    require_not_negative("adamw", eps=eps, weight_decay=weight_decay)
    rates = partial(decay_rates, weight_decay, decay)

    def init(params: Any) -> AdamWState:
        rates(params)  # raises for a pattern that matches nothing
        return AdamWState(torch.zeros(()), zeros_like(params), zeros_like(params))

    @mark_elementwise
    def update(grads: Any, state: AdamWState, params: Any, constants: Any = None) -> tuple[Any, AdamWState]:
        rate, step = learning_rate(lr, state.step), state.step + 1

        def one(
            p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, rate_of_decay: float
        ) -> tuple[torch.Tensor, ...]:
            return adamw_of_one(p, g, m, v, step, rate, *betas, eps, rate_of_decay)

        constants = rates(params) if constants is None else constants
        new, mean, square = map_leaves(one, params, grads, state.mean, state.square, constants=constants)
        return new, AdamWState(step, mean, square)

    return Optimizer(init, update, constants=rates)
