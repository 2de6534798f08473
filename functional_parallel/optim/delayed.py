"""Updates by gradients that are one step old."""

from __future__ import annotations

import math
from typing import Any, cast

import optree
import torch

from sharding_specs import P

from ..functions import PyTree, SpecTree
from ..ir import is_trained, scalar_beside
from ..quantities import is_number
from .optimizer import DelayedState, Optimizer, zeros_like


def delayed(optimizer: Optimizer, after: float = 40) -> Optimizer:
    """Return an optimizer that updates by the gradient of the previous step, after a warm-up.

    This is the delayed parameter update of ZeRO-Offload (arXiv 2101.06840 §4.3): the update of a step does not wait for
    its gradient, so a host can do it while the device computes the next gradient. The warm-up updates as `optimizer`
    does. The next step holds its gradient and updates nothing. From then on θ_(i+1) = Opt(θ_i, g(θ_(i−1))).

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.delayed(fp.optim.sgd(0.5), after=1)
    >>> w = torch.tensor([8.0])
    >>> state, seen = optimizer.init(w), []
    >>> for _ in range(4):                                  # the gradient of w²/2 is w
    ...     w, state = optimizer.update(w, state, w)
    ...     seen.append(w.item())
    >>> seen
    [4.0, 4.0, 2.0, 0.0]

    The state has one gradient more, which is sharded, saved and restored like a moment. A gradient is clipped when it
    is computed. Schedules count updates. An update that a loss scale skips is made up in the next step.

    Args:
        optimizer: the optimizer. With parameter groups it may be `fp.optim.by_path(…)`, or one of its values.
        after: number of updates of the warm-up. `math.inf` never delays.

    Returns:
        An optimizer with the state `DelayedState`.

    Raises:
        TypeError: if `optimizer` is not an optimizer.
        ValueError: for a negative number of updates, or a number that is not whole.
    """
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"delayed takes an fp.optim.Optimizer, not {optimizer!r}")
    if after != math.inf and not (is_number(after) and after >= 0 and after == int(after)):
        raise ValueError(f"delayed(after={after!r}): give the number of updates before the delay, 0 or more")

    def init(params: PyTree) -> DelayedState:
        return DelayedState(scalar_beside(params), optimizer.init(params), zeros_like(params))

    def update(
        grads: PyTree, state: DelayedState, params: PyTree, *specs: SpecTree, **own: PyTree
    ) -> tuple[PyTree, DelayedState]:
        leaves, tree = optree.tree_flatten(params)
        now, before = tree.flatten_up_to(grads), tree.flatten_up_to(state.gradient)
        has = [is_trained(leaf) and grad is not None for leaf, grad in zip(leaves, now, strict=True)]
        rows = list(zip(has, now, before, strict=True))
        taken = tree.unflatten([torch.where(state.step < after, g, held) if own else g for own, g, held in rows])
        new, inner = optimizer.update(taken, state.inner, params, *specs, **own)
        kept = tree.unflatten([g.to(held.dtype) if own else held for own, g, held in rows])

        def chosen(old: PyTree, new: PyTree) -> PyTree:
            return torch.where(state.step == after, old, new) if isinstance(new, torch.Tensor) else new

        new, inner = optree.tree_map(chosen, (params, state.inner), (new, inner))
        return new, DelayedState(state.step + 1, inner, kept)

    def specs(params: PyTree, layouts: SpecTree) -> SpecTree:
        assert optimizer.specs is not None
        return DelayedState(cast(Any, P()), optimizer.specs(params, layouts), layouts)

    return optimizer._replace(init=init, update=update, specs=specs if optimizer.specs else None)
