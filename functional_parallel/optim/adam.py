"""Adam (Kingma & Ba, arXiv 1412.6980), as `torch.optim.Adam` defines it, with torch's fused kernel."""

from __future__ import annotations

from ..functions import explain_keywords
from .adamw import AdamWState, scale_by_adam
from .chain import add_decayed_weights, chained, scale_by_learning_rate
from .decay import Decay
from .hyperparameters import require
from .optimizer import Optimizer, Schedule

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
    """Return the optimizer Adam: steps along the mean gradient, divided by the root of the mean squared gradient.

    g ← g + λ p;  m ← β₁ m + (1−β₁) g;  v ← β₂ v + (1−β₂) g²;  p ← p − lr m̂ / (√v̂ + ε).

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
    require("adam", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    decayed, scaled = add_decayed_weights(weight_decay, decay), scale_by_adam(betas=betas, eps=eps)
    return chained("adam", AdamWState, decayed, scaled, scale_by_learning_rate(lr))
