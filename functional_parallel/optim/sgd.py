"""Stochastic gradient descent with momentum, as `torch.optim.SGD` defines it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from ..functions import explain_keywords
from ..quantities import is_number
from .decay import Decay, decay_rates
from .hyperparameters import require_not_negative, require_rate
from .optimizer import Optimizer, Schedule, learning_rate, map_leaves, mark_elementwise, zeros_like

__all__ = ["SGDState", "sgd"]


class SGDState(NamedTuple):
    """State of `sgd`."""

    step: torch.Tensor  # () number of updates done
    velocity: Any  # like params; None without momentum


@explain_keywords
def sgd(
    lr: Schedule,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay: Decay = None,
) -> Optimizer:
    """v ← μ v + (1−τ)(g + λ p);  p ← p − lr · v (or, Nesterov, p − lr · (g + λ p + μ v)).

    >>> import torch
    >>> optimizer = sgd(0.5)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([1.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.5000])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate.
        momentum: μ.
        dampening: τ, from the second update on.
        nesterov: whether to use Nesterov momentum.
        weight_decay: λ, added to the gradient.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Raises:
        ValueError: for a value that is not a number, and for a negative rate, momentum or weight decay. Also for
            Nesterov momentum without `momentum` or with `dampening`.
    """
    require_rate("sgd", lr)
    require_not_negative("sgd", momentum=momentum, weight_decay=weight_decay)
    if not is_number(dampening):
        raise ValueError(f"sgd(dampening={dampening!r}): give a number")
    if nesterov and (momentum <= 0 or dampening):
        raise ValueError("sgd(nesterov=True) needs momentum > 0 and dampening = 0")

    rates = partial(decay_rates, weight_decay, decay)

    def init(params: Any) -> SGDState:
        rates(params)  # raises for a pattern that matches nothing
        velocity = zeros_like(params) if momentum else None
        return SGDState(torch.zeros(()), velocity)

    @mark_elementwise
    def update(grads: Any, state: SGDState, params: Any, constants: Any = None) -> tuple[Any, SGDState]:
        rate = learning_rate(lr, state.step)
        constants = rates(params) if constants is None else constants

        def plain(p: torch.Tensor, g: torch.Tensor, rate_of_decay: float) -> tuple[torch.Tensor, ...]:
            return (p - rate.to(p.dtype) * decayed(g, p, rate_of_decay),)

        def with_momentum(
            p: torch.Tensor, g: torch.Tensor, v: torch.Tensor, rate_of_decay: float
        ) -> tuple[torch.Tensor, ...]:
            g = decayed(g, p, rate_of_decay)
            v = torch.where(state.step == 0, g, momentum * v + (1 - dampening) * g if dampening else momentum * v + g)
            return p - rate.to(p.dtype) * (g + momentum * v if nesterov else v), v

        if not momentum:
            return map_leaves(plain, params, grads, constants=constants)[0], SGDState(state.step + 1, None)
        new, velocity = map_leaves(with_momentum, params, grads, state.velocity, constants=constants)
        return new, SGDState(state.step + 1, velocity)

    return Optimizer(init, update, constants=rates)


def decayed(gradient: torch.Tensor, parameter: torch.Tensor, rate: float) -> torch.Tensor:
    """Return the gradient with weight decay added: L2 regularisation."""
    return gradient + rate * parameter if rate else gradient
