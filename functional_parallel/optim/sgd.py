"""Stochastic gradient descent with momentum, as `torch.optim.SGD` defines it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .optimizer import Optimizer, Schedule, learning_rate, map_leaves, zeros_like

__all__ = ["SGDState", "sgd"]


class SGDState(NamedTuple):
    """State of `sgd`."""

    step: torch.Tensor  # () number of updates done
    velocity: Any  # like params; None without momentum


def sgd(lr: Schedule, *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimizer:
    """v ← μ v + g + λ p;  p ← p − lr · v (or, Nesterov, p − lr · (g + λ p + μ v)).

    >>> import torch
    >>> optimizer = sgd(0.5)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([1.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.5000])}

    Args:
        lr: learning rate, or a function from the number of updates done to it.
        momentum: μ.
        nesterov: look ahead by the momentum.
        weight_decay: λ, added to the gradient.

    Raises:
        ValueError: Nesterov without momentum.
    """
    if nesterov and momentum <= 0:
        raise ValueError("sgd(nesterov=True) needs momentum > 0")

    def init(params: Any) -> SGDState:
        velocity = zeros_like(params) if momentum else None
        return SGDState(torch.zeros(()), velocity)

    def update(grads: Any, state: SGDState, params: Any) -> tuple[Any, SGDState]:
        rate = learning_rate(lr, state.step)

        def plain(p: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (p - rate.to(p.dtype) * _decayed(g, p),)

        def with_momentum(p: torch.Tensor, g: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
            g = _decayed(g, p)
            v = torch.where(state.step == 0, g, momentum * v + g)
            return p - rate.to(p.dtype) * (g + momentum * v if nesterov else v), v

        def _decayed(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
            return g + weight_decay * p if weight_decay else g

        if not momentum:
            return map_leaves(plain, params, grads)[0], SGDState(state.step + 1, None)
        new, velocity = map_leaves(with_momentum, params, grads, state.velocity)
        return new, SGDState(state.step + 1, velocity)

    return Optimizer(init, update)
