"""Adam (Kingma & Ba, arXiv 1412.6980), as `torch.optim.Adam` defines it, with torch's fused kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..functions import explain_keywords
from .adamw import AdamWState, adamw
from .decay import Decay, decay_rates
from .hyperparameters import require_betas, require_not_negative, require_rate
from .optimizer import Optimizer, Schedule, map_gradients, mark_elementwise
from .sgd import decayed

__all__ = ["adam"]


@explain_keywords
def adam(
    lr: Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay: Decay = None,
) -> Optimizer:
    """g ← g + λ p;  m ← β₁ m + (1−β₁) g;  v ← β₂ v + (1−β₂) g²;  p ← p − lr m̂ / (√v̂ + ε).

    >>> import torch
    >>> optimizer = adam(0.1)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([2.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.9000])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate.
        betas: β₁ and β₂.
        eps: ε, outside the root.
        weight_decay: λ. The decay is added to the gradient, so it is also divided by √v̂; `adamw` decouples the two.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Raises:
        ValueError: for a number that is out of range.
    """
    require_rate("adam", lr)
    require_betas("adam", betas)
    require_not_negative("adam", eps=eps, weight_decay=weight_decay)
    plain = adamw(lr, betas=betas, eps=eps, weight_decay=0.0)

    rates = partial(decay_rates, weight_decay, decay)

    def init(params: Any) -> AdamWState:
        rates(params)  # raises for a pattern that matches nothing
        return plain.init(params)

    @mark_elementwise
    def update(grads: Any, state: AdamWState, params: Any, constants: Any = None) -> tuple[Any, AdamWState]:
        def one(p: torch.Tensor, g: torch.Tensor, rate: float) -> torch.Tensor:
            return decayed(g, p, rate)

        constants = rates(params) if constants is None else constants
        grads = map_gradients(one, params, grads, constants=constants)
        return plain.update(grads, state, params)

    return Optimizer(init, update, constants=rates)
