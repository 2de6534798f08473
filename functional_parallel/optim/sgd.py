"""Stochastic gradient descent with momentum, as `torch.optim.SGD` defines it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..functions import PyTree, explain_keywords
from ..quantities import is_number
from .chain import Transformation, add_decayed_weights, chained, scale_by_learning_rate
from .hyperparameters import Decay, require
from .optimizer import Optimizer, Schedule, scheduled


class SGDState(NamedTuple):
    """State of `sgd`."""

    step: Tensor  # () number of updates done
    velocity: PyTree  # like params; None without momentum


@explain_keywords
def sgd(
    lr: Schedule,
    *,
    momentum: Schedule = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decay: Decay = None,
) -> Optimizer:
    """Return stochastic gradient descent: steps against the gradient, or against a momentum of past gradients.

    v ← μ v + (1−τ)(g + λ p);  p ← p − lr · v (or, Nesterov, p − lr · (g + λ p + μ v)).

    >>> import torch
    >>> optimizer = sgd(0.5)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([1.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.5000])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate.
        momentum: μ, or a function from the number of updates done to μ.
        dampening: τ, from the second update on.
        nesterov: whether to use Nesterov momentum.
        weight_decay: λ, added to the gradient.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Raises:
        ValueError: for a value that is not a number, and for a negative rate, momentum or weight decay. Also for
            Nesterov momentum without `momentum` or with `dampening`.
    """
    require("sgd", lr=lr, weight_decay=weight_decay)
    parts = add_decayed_weights(weight_decay, decay), _trace("sgd", momentum, dampening, nesterov)
    return chained("sgd", lambda step, v=None: SGDState(step, v), *parts, scale_by_learning_rate(lr))


@explain_keywords
def trace(momentum: Schedule, *, dampening: float = 0.0, nesterov: bool = False) -> Transformation:
    """Replace the update by momentum: a sum of past updates, each weaker than the next (Sutskever et al., ICML 2013).

    v ← μ v + (1−τ) u;  u ← v (or, Nesterov, u + μ v), as in `torch.optim.SGD` and `optax.trace`.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.chain(fp.optim.trace(0.5), fp.optim.scale_by_learning_rate(1.0))
    >>> params, grads = {"w": torch.tensor([3.0])}, {"w": torch.tensor([1.0])}
    >>> once, state = optimizer.update(grads, optimizer.init(params), params)
    >>> optimizer.update(grads, state, once)[0]
    {'w': tensor([0.5000])}

    Args:
        momentum: μ, or a function from the number of updates done to μ. With 0 the update does not change.
        dampening: τ, from the second update on.
        nesterov: whether to use Nesterov momentum.

    Returns:
        A transformation with one moment, v; none if μ is 0.

    Raises:
        ValueError: as for `sgd`.
    """
    return _trace("trace", momentum, dampening, nesterov)


def _trace(name: str, momentum: Schedule, dampening: float, nesterov: bool) -> Transformation:
    constant = None if callable(momentum) else momentum
    require(name, momentum=0.0 if constant is None else constant)
    if not is_number(dampening):
        raise ValueError(f"{name}(dampening={dampening!r}): give a number")
    if nesterov and ((constant is not None and constant <= 0) or dampening):
        raise ValueError(f"{name}(nesterov=True) needs momentum > 0 and dampening = 0")

    def update(step: Tensor) -> Callable[..., Tensor | tuple[Tensor, ...]]:
        factor = scheduled(momentum, step)

        def one(g: Tensor, p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            v = torch.where(step == 0, g, factor * v + (1 - dampening) * g if dampening else factor * v + g)
            return (g + factor * v if nesterov else v), v

        return one if momentum else lambda g, p: g

    return Transformation(update, 1 if momentum else 0, elementwise=True)
