"""AdamW (Loshchilov & Hutter, arXiv 1711.05101), as `torch.optim.AdamW` defines it, with torch's fused kernel."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from .. import _torch
from .decay import Decay, decay_rates
from .optimizer import Optimizer, Schedule, learning_rate, map_leaves, zeros_like

__all__ = ["AdamWState", "adamw"]


class AdamWState(NamedTuple):
    """State of `adamw`."""

    step: torch.Tensor  # () number of updates done
    mean: Any  # like params: moving average of gradients
    square: Any  # like params: moving average of their squares


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
        lr: learning rate, or a function from the number of updates done to it.
        betas: β₁ and β₂.
        eps: ε, outside the root.
        weight_decay: λ, decoupled from the gradient.
        decay: which parameters decay: path pattern → whether, or a predicate of path and leaf; all by default.
    """

    rates = partial(decay_rates, weight_decay, decay)

    def init(params: Any) -> AdamWState:
        rates(params)  # a pattern that matches nothing is refused here
        return AdamWState(torch.zeros(()), zeros_like(params), zeros_like(params))

    def update(grads: Any, state: AdamWState, params: Any, constants: Any = None) -> tuple[Any, AdamWState]:
        rate, step = learning_rate(lr, state.step), state.step + 1

        def one(
            p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, rate_of_decay: float
        ) -> tuple[torch.Tensor, ...]:
            return torch.ops.fp.adamw(p, g, m, v, step, rate, *betas, eps, rate_of_decay)

        constants = rates(params) if constants is None else constants
        new, mean, square = map_leaves(one, params, grads, state.mean, state.square, constants=constants)
        return new, AdamWState(step, mean, square)

    return Optimizer(init, update, constants=rates)


# -----------------------------------------------------------------------------
# One parameter's update as one op
# -----------------------------------------------------------------------------

_library = torch.library.Library("fp", "FRAGMENT")
_library.define(
    "adamw(Tensor p, Tensor g, Tensor m, Tensor v, Tensor step, Tensor lr, float beta1, float beta2, float eps, "
    "float weight_decay) -> (Tensor, Tensor, Tensor)",
)

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _kernel(p: Any, g: Any, m: Any, v: Any, step: Any, lr: Any, beta1: Any, beta2: Any, eps: Any, decay: Any) -> Triple:
    if not _torch.has_fused_adamw(p):
        return _formula(p, g, m, v, step, lr, beta1, beta2, eps, decay)
    shape, count = p.shape, p.numel()
    p, m, v = (_in_vectors(x, copy=True) for x in (p, m, v))
    g = _in_vectors(g, copy=False)
    _torch.fused_adamw_(p, g, m, v, step.to(p.device, torch.float32), float(lr), beta1, beta2, decay, eps)
    if p.numel() == count:
        return p.view(shape), m.view(shape), v.view(shape)
    return tuple(x[:count].clone().view(shape) for x in (p, m, v))  # type: ignore[return-value]


_VECTOR = 64  # elements; the kernel works on cache lines of so many, of the narrowest dtype


def _in_vectors(x: torch.Tensor, copy: bool) -> torch.Tensor:
    """Flat and filled up: the kernel rounds what is left beside whole vectors otherwise than what is in them.

    So an element's update depends on nothing but its values, and is the same in a parameter and in a part of it.
    """
    count = x.numel()
    if count % _VECTOR == 0:
        return (x.clone(memory_format=torch.contiguous_format) if copy else x).reshape(-1)
    flat = x.new_zeros(-(-count // _VECTOR) * _VECTOR)
    flat[:count] = x.reshape(-1)
    return flat


def _formula(
    p: Any, g: Any, m: Any, v: Any, step: Any, lr: Any, beta1: Any, beta2: Any, eps: Any, decay: Any
) -> Triple:
    lr, step = lr.to(p.dtype), step.to(p.dtype)
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    denominator = (v / (1 - beta2**step)).sqrt() + eps
    return p * (1 - lr * decay) - lr / (1 - beta1**step) * m / denominator, m, v


def _fake(p: Any, g: Any, m: Any, v: Any, *_: Any) -> Triple:
    return torch.empty_like(p), torch.empty_like(m), torch.empty_like(v)


_library.impl("adamw", _kernel, "CompositeExplicitAutograd")
torch.library.register_fake("fp::adamw", _fake, lib=_library)
