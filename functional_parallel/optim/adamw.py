"""Adam (Kingma & Ba, arXiv 1412.6980) and AdamW (Loshchilov & Hutter, arXiv 1711.05101), as in `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..functions import PyTree, explain_keywords
from ..ops import adamw_formula, adamw_of_one
from .chain import Constants, Transformation, add_decayed_weights, chained, scale_by_learning_rate
from .hyperparameters import Decay, constants_of, require
from .optimizer import Optimizer, Schedule, learning_rate, scheduled

Betas = tuple[Schedule, Schedule]


class AdamWState(NamedTuple):
    """State of `adamw`."""

    step: Tensor  # () number of updates done
    mean: PyTree  # like params: moving average of gradients
    square: PyTree  # like params: moving average of their squares


@explain_keywords
def adam(
    lr: Schedule,
    *,
    betas: Betas = (0.9, 0.999),
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
        betas: β₁ and β₂, each a number or a function from the number of updates done.
        eps: ε, outside the root.
        weight_decay: λ. The decay is added to the gradient, so it is also divided by √v̂; `adamw` decouples the two.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Raises:
        ValueError: for a number that is out of range.
    """
    require("adam", lr=lr, betas=constants_of(betas), eps=eps, weight_decay=weight_decay)
    decayed, scaled = add_decayed_weights(weight_decay, decay), scale_by_adam(betas=betas, eps=eps)
    return chained("adam", AdamWState, decayed, scaled, scale_by_learning_rate(lr))


@explain_keywords
def adamw(
    lr: Schedule,
    *,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decay: Decay = None,
) -> Optimizer:
    """Return the optimizer AdamW: Adam, with a weight decay that is decoupled from the gradient.

    m ← β₁ m + (1−β₁) g;  v ← β₂ v + (1−β₂) g²;  p ← p (1 − lr λ) − lr m̂ / (√v̂ + ε).

    >>> import torch
    >>> optimizer = adamw(0.1, weight_decay=0.0)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([2.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.9000])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate.
        betas: β₁ and β₂, each a number or a function from the number of updates done.
        eps: ε, outside the root.
        weight_decay: λ, decoupled from the gradient.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Raises:
        ValueError: for a number that is out of range.
    """
    require("adamw", lr=lr, betas=constants_of(betas), eps=eps, weight_decay=weight_decay)
    adam, decayed = scale_by_adam(betas=betas, eps=eps), add_decayed_weights(weight_decay, decay)
    return chained("adamw", AdamWState, adam, decayed, scale_by_learning_rate(lr))


@explain_keywords
def scale_by_adam(*, betas: Betas = (0.9, 0.999), eps: float = 1e-8) -> Transformation:
    """Replace the update by its mean, divided by the root of its mean square (Kingma & Ba, arXiv 1412.6980).

    m ← β₁ m + (1−β₁) u;  v ← β₂ v + (1−β₂) u²;  u ← m̂ / (√v̂ + ε), as in `optax.scale_by_adam`.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.chain(fp.optim.scale_by_adam(), fp.optim.scale_by_learning_rate(0.1))
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([2.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.9000])}

    Args:
        betas: β₁ and β₂, each a number or a function from the number of updates done.
        eps: ε, outside the root.

    Returns:
        A transformation with two moments, m and v.

    Raises:
        ValueError: for a number that is out of range.
    """
    require("scale_by_adam", betas=constants_of(betas), eps=eps)

    def fused(lr: Schedule, constants: Constants | None) -> Transformation:
        def update(step: Tensor) -> Callable[..., tuple[Tensor, ...]]:
            rate, count, own = learning_rate(lr, step), step + 1, [scheduled(beta, step) for beta in betas]
            change: Callable[..., tuple[Tensor, ...]] = (
                adamw_formula if any(map(callable, betas)) else adamw_of_one
            )  # the kernel takes numbers
            return lambda g, p, m, v, decay=0.0: change(p, g, m, v, count, rate, *own, eps, decay)

        return Transformation(update, 2, constants)

    def update(step: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        descend = fused(1.0, None).update(step)  # of parameters of 0, at the rate 1

        def one(g: Tensor, p: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
            below, *moments = descend(g, torch.zeros_like(g), m, v)
            return -below, *moments

        return one

    return Transformation(update, 2, fused=fused, elementwise=True)
