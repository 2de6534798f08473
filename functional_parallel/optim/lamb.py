"""LAMB (You et al., arXiv 1904.00962), also correct on shards.

The step of a parameter is scaled by a ratio of two norms of the full parameter, so LAMB is not elementwise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from sharding_specs import P

from ..functions import PyTree, SpecTree, explain_keywords
from ..ir import scalar_beside
from ..quantities import is_non_negative
from .hyperparameters import Decay, decay_rates, require
from .optimizer import Optimizer, Schedule, learning_rate, map_leaves, zeros_like
from .sharded_sums import decays_and_specs, sum_over_shards


class LambState(NamedTuple):
    """State of `lamb`."""

    step: PyTree  # () number of updates done
    mean: PyTree  # like params: moving average of gradients
    square: PyTree  # like params: moving average of their squares


@explain_keywords
def lamb(
    lr: Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    trust: tuple[float, float] = (0.0, math.inf),
    bias_correction: bool = True,
    decay: Decay = None,
) -> Optimizer:
    """Return the optimizer LAMB: AdamW's steps, each as long as a multiple of the norm of its parameter.

    m, v as in Adam;  u = m̂ / (√v̂ + ε) + λ p;  p ← p − lr · ‖p‖ / ‖u‖ · u.

    >>> import torch
    >>> optimizer = lamb(0.1)
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> optimizer.update({"w": torch.tensor([1.0, 1.0])}, optimizer.init(params), params)[0]
    {'w': tensor([2.6464, 3.6464])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate.
        betas: β₁ and β₂.
        eps: ε, outside the root.
        weight_decay: λ.
        trust: bounds of the ratio ‖p‖ / ‖u‖. If a norm is 0, the ratio is 1.
        bias_correction: whether to divide m and v by 1 − βᵗ.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Returns:
        An optimizer. Its update takes the specs of the parameters as fourth argument; `train_step` passes them.

    Raises:
        ValueError: for a number that is out of range.
    """
    require("lamb", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
    low, high = trust
    if not (is_non_negative(low) and low <= high):
        raise ValueError(f"lamb(trust={trust!r}): give a lower bound of at least 0, and an upper bound")
    beta1, beta2 = betas

    def init(params: PyTree) -> LambState:
        decay_rates(weight_decay, decay, params)  # raises for a pattern that matches nothing
        return LambState(scalar_beside(params), zeros_like(params), zeros_like(params))

    def update(grads: PyTree, state: LambState, params: PyTree, specs: SpecTree = None) -> tuple[PyTree, LambState]:
        rate, count = learning_rate(lr, state.step), state.step.double() + 1
        unbiased = [1 - beta**count if bias_correction else torch.ones_like(count) for beta in betas]

        def one(p: Tensor, g: Tensor, m: Tensor, v: Tensor, constant: tuple[float, P]) -> tuple[Tensor, ...]:
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            first, second = (bias.to(p.dtype) for bias in unbiased)
            u = m / first / ((v / second).sqrt() + eps) + constant[0] * p
            squares = torch.stack([(x * x).sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in (p, u)])
            of_p, of_u = sum_over_shards(squares, sorted(constant[1].axes)).sqrt()
            ratio = torch.where((of_p > 0) & (of_u > 0), (of_p / of_u).clamp(low, high), 1.0)
            return p - (rate * ratio).to(p.dtype) * u, m, v

        constants = decays_and_specs("lamb", "its norms need", decay_rates(weight_decay, decay, params), specs, params)
        new, *moments = map_leaves(one, params, grads, state.mean, state.square, constants=constants)
        return new, LambState(state.step + 1, *moments)

    return Optimizer(init, update, lambda params, specs: LambState(P(), specs, specs), lr=lr)
