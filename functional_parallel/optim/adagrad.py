"""Adagrad (Duchi et al., JMLR 2011), as `torch.optim.Adagrad` defines it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..functions import PyTree, explain_keywords
from .chain import Transformation, add_decayed_weights, chained, scale_by_learning_rate
from .hyperparameters import Decay, require
from .optimizer import Optimizer, Schedule, learning_rate


class AdagradState(NamedTuple):
    """State of `adagrad`."""

    step: Tensor  # () number of updates done
    sum: PyTree  # like params: sum of squared gradients


@explain_keywords
def adagrad(
    lr: Schedule,
    *,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    decay: Decay = None,
) -> Optimizer:
    """Return the optimizer Adagrad: steps along the gradient, divided by the root of the sum of squared gradients.

    g ← g + λ p;  s ← s + g²;  p ← p − lr / (1 + t η) · g / (√(s₀ + s) + ε).

    >>> import torch
    >>> optimizer = adagrad(0.1)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([2.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.9000])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate.
        lr_decay: η.
        weight_decay: λ, added to the gradient.
        initial_accumulator_value: s₀.
        eps: ε, outside the root.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Raises:
        ValueError: for a number that is out of range.
    """
    start = initial_accumulator_value
    require("adagrad", lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, initial_accumulator_value=start, eps=eps)

    def scaled(step: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        def one(g: Tensor, p: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
            total = total + g * g
            return g / ((total + start).sqrt() + eps), total

        return one

    def decayed_rate(step: float | Tensor) -> Tensor:
        return learning_rate(lr, torch.as_tensor(step, device=getattr(step, "device", "cpu"))) / (1 + step * lr_decay)

    rate = scale_by_learning_rate(decayed_rate if lr_decay else lr)
    return chained(
        "adagrad",
        AdagradState,
        add_decayed_weights(weight_decay, decay),
        Transformation(scaled, 1, elementwise=True),
        rate,
    )
