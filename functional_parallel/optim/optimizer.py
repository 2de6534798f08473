"""What an optimizer is: `init(params) -> state` and `update(grads, state, params) -> (params, state)`, both pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch

__all__ = ["Optimizer", "Schedule", "learning_rate", "map_leaves", "zeros_like"]

PyTree = Any
Schedule = float | Callable[[torch.Tensor], Any]


class Optimizer(NamedTuple):
    """A pair of pure functions.

    Every state has subtrees of the parameters' own structure (the moments), which lie as the parameters do, and
    scalars.

    Attributes:
        init: params → state.
        update: (gradients, state, params) → (new params, new state). Elementwise, so it may be given shards.
    """

    init: Callable[[PyTree], Any]
    update: Callable[[PyTree, Any, PyTree], tuple[PyTree, Any]]


def learning_rate(lr: Schedule, step: torch.Tensor) -> torch.Tensor:
    """The rate of a step (0 for the first) as a float64 scalar: in float32, 0.1 would be off by 1e-9.

    >>> import torch
    >>> learning_rate(lambda step: 0.1 / (1 + step), torch.tensor(1.0))
    tensor(0.0500, dtype=torch.float64)
    """
    rate = lr(step.double()) if callable(lr) else lr
    return torch.as_tensor(rate, dtype=torch.float64, device=step.device)


def zeros_like(params: PyTree) -> PyTree:
    """A moment's start: zero for every tensor; other leaves stand for themselves."""
    return optree.tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, params)


def map_leaves(update: Callable[..., tuple[torch.Tensor, ...]], params: PyTree, *trees: PyTree) -> tuple[PyTree, ...]:
    """Apply an update to every floating parameter with its gradient and state; returns one tree per result.

    Leaves that are not floating tensors stay as they are.
    """
    leaves, tree = optree.tree_flatten(params)
    columns = [tree.flatten_up_to(other) for other in trees]
    rows = []
    for leaf, *others in zip(leaves, *columns, strict=True):
        floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and others[0] is not None
        rows.append(update(leaf, *others) if floating else (leaf, *others[1:]))
    return tuple(tree.unflatten(column) for column in zip(*rows, strict=True))
