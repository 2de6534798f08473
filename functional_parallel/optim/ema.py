"""Exponential moving average of the parameters in the optimizer's state."""

from __future__ import annotations

from typing import Any, cast

import optree
import torch
from torch import Tensor

from sharding_specs import P

from ..functions import PyTree, SpecTree
from ..ir import is_trained, scalar_beside
from ..quantities import is_number
from .optimizer import EMAState, Optimizer, Schedule, scheduled


def ema(optimizer: Optimizer, decay: Schedule = 0.999) -> Optimizer:
    """Return an optimizer that also averages the parameters over its updates (Polyak & Juditsky, 1992).

    a ← δ a + (1−δ) p after each update; after the first one, a ← p.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.ema(fp.optim.sgd(1.0), decay=0.75)
    >>> params, grads = {"w": torch.tensor([4.0])}, {"w": torch.tensor([1.0])}
    >>> state = optimizer.init(params)
    >>> for _ in range(3):                                  # 3.0, which is copied; 2.0; 1.0
    ...     params, state = optimizer.update(grads, state, params)
    >>> state.average
    {'w': tensor([2.3125])}

    It is `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, updated after each step: the average
    begins with the parameters after the first update, so it needs no correction of a bias. The average is sharded,
    saved and restored like a moment. The optimizer's parameters are averaged: the masters, if there are any.
    An update that a loss scale skips does not change it. `train.params(state, ema=True)` returns the average, and
    `train.compile(f, ema=True)` evaluates functions of it.

    Args:
        optimizer: the optimizer. With parameter groups it is `fp.optim.by_path(…)`: the average is of all groups.
        decay: δ, or a function from the number of updates done to δ.

    Returns:
        An optimizer with the state `EMAState`.

    Raises:
        TypeError: if `optimizer` is not an optimizer.
        ValueError: for a constant δ outside of [0, 1].
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"ema takes an fp.optim.Optimizer, not {optimizer!r}")
    if not callable(decay) and not (is_number(decay) and 0 <= decay <= 1):
        raise ValueError(
            f"ema(decay={decay!r}): give a number from 0 to 1, or a function of the number of updates done"
        )

    def init(params: PyTree) -> EMAState:
        state = optimizer.init(params)
        return EMAState(
            scalar_beside(params), state, optree.tree_map(lambda x: x.clone() if is_trained(x) else x, params)
        )

    def update(
        grads: PyTree, state: EMAState, params: PyTree, *specs: SpecTree, **own: PyTree
    ) -> tuple[PyTree, EMAState]:
        new, inner = optimizer.update(grads, state.inner, params, *specs, **own)
        factor = scheduled(decay, state.step)

        def averaged(average: PyTree, leaf: PyTree) -> PyTree:
            if not is_trained(leaf):
                return leaf
            weight = 1 - (factor.to(leaf.real.dtype) if isinstance(factor, Tensor) else factor)
            return torch.where(state.step == 0, leaf, average + weight * (leaf - average))

        return new, EMAState(state.step + 1, inner, optree.tree_map(averaged, state.average, new))

    def specs(params: PyTree, layouts: SpecTree) -> SpecTree:
        assert optimizer.specs is not None
        return EMAState(cast(Any, P()), optimizer.specs(params, layouts), layouts)

    return optimizer._replace(init=init, update=update, specs=specs if optimizer.specs else None)
