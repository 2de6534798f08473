"""What an optimizer is: `init(params) -> state` and `update(grads, state, params) -> (params, state)`, both pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import optree
import torch

from sharding_specs import register_dataclasses

from ..ir import as_complex, as_real, is_trained
from ..tracing import needs_values
from .host_rates import rate_on_host

__all__ = [
    "Optimizer",
    "Schedule",
    "clip_value",
    "is_known_elementwise",
    "learning_rate",
    "map_gradients",
    "map_leaves",
    "mark_elementwise",
    "skipping",
    "skips_untrained",
    "zeros_like",
]

PyTree = Any
F = TypeVar("F", bound=Callable[..., Any])
Schedule = float | Callable[[torch.Tensor], Any]


class Optimizer(NamedTuple):
    """A pair of pure functions.

    A state has subtrees of the parameters' own structure (the moments), whose leaves lie as the parameters do where
    they have their shapes; all else in it is whole on every rank. `update` is written for whole parameters. One that
    is not elementwise is partitioned by `train_step`, unless it says by `specs` that it is made for shards, as
    Adafactor, whose row and column means lie as those dims of the parameters do.

    A parameter without a path to the loss has a gradient of zeros here. `train_step` keeps the old parameter, and the
    old state where it has the parameter's shape in a subtree of the parameters' structure, whatever `update` returns.
    A step count belongs to all parameters, so it counts on.

    Attributes:
        init: params → state.
        update: (gradients, state, params) → (new params, new state).
        specs: (params, their specs) → specs of the state. With it `update` is given shards, and the specs of the
            parameters as a fourth argument, which tell it over which axes a sum over a dim must go.
        constants: params → what the update treats parameters differently by, such as their weight decay: a number (or
            anything hashable) for each, as a tree, or one for all. It is asked of whole parameters, stacks of layers
            too, and what it says is given to `update` as keyword. It promises that `update` is elementwise, and may
            be given shards as they are; `train_step` refuses one of which it sees that it is not. With it parameters
            may be laid end to end (`fp.zero(1, "data", layout="flat")`): those with equal constants are given to
            `update` as one.
    """

    init: Callable[[PyTree], Any]
    update: Callable[..., tuple[PyTree, Any]]
    specs: Callable[[PyTree, PyTree], Any] | None = None
    constants: Callable[[PyTree], PyTree] | None = None


_skipping: WeakSet[Any] = WeakSet()
_known: WeakSet[Any] = WeakSet()  # by identity: a wrapper's attributes would be those of what it wraps


def mark_elementwise(update: F) -> F:
    """Mark an update of ours that tests show to be elementwise: to read that off a trace takes time at every start."""
    _known.add(update)
    return skipping(update)


def skipping(update: F) -> F:
    """Mark an update that leaves a parameter, and its state, unchanged if its gradient is None."""
    _skipping.add(update)
    return update


def skips_untrained(update: Callable[..., Any]) -> bool:
    """Whether an update is one of those."""
    return update in _skipping


def is_known_elementwise(update: Callable[..., Any]) -> bool:
    """Whether an update is one of those."""
    return update in _known


def clip_value(optimizer: Optimizer, bound: float) -> Optimizer:
    """The optimizer, given gradients whose every element is first brought into [-bound, bound].

    It needs no sum over ranks, so it is right under every sharding; `train_step(clip=…)` bounds the global norm
    instead, before this. Of complex gradients it bounds the real and the imaginary parts.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.clip_value(fp.optim.sgd(1.0), 0.5)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.update({"w": torch.tensor([3.0, 0.25])}, optimizer.init(params), params)[0]
    {'w': tensor([0.5000, 0.7500])}

    Args:
        optimizer: the optimizer.
        bound: the largest absolute value that passes unchanged.

    Returns:
        An optimizer with the same state.

    Raises:
        ValueError: when the bound is not positive.
    """
    if not bound > 0:
        raise ValueError(f"clip_value(bound={bound!r}): the bound must be positive")

    def update(grads: PyTree, state: Any, params: PyTree, *specs: PyTree, **constants: PyTree) -> tuple[PyTree, Any]:
        clipped = map_gradients(lambda _, grad: grad.clamp(-bound, bound), params, grads)
        return optimizer.update(clipped, state, params, *specs, **constants)

    if is_known_elementwise(optimizer.update):
        mark_elementwise(update)
    if skips_untrained(optimizer.update):
        skipping(update)
    return Optimizer(optimizer.init, update, optimizer.specs, optimizer.constants)


def learning_rate(lr: Schedule, step: torch.Tensor) -> torch.Tensor:
    """Return the rate of a step (0 for the first) as a float64 scalar: in float32, 0.1 would be off by 1e-9.

    >>> import torch
    >>> learning_rate(lambda step: 0.1 / (1 + step), torch.tensor(1.0))
    tensor(0.0500, dtype=torch.float64)

    A function that cannot be traced, since it needs the value of `step`, is called when the program runs, on the host.
    """
    try:
        rate = lr(step.double()) if callable(lr) else lr
    except Exception as error:
        if not needs_values(error):
            raise
        return rate_on_host(lr, step)  # type: ignore[arg-type]
    return torch.as_tensor(rate, dtype=torch.float64, device=step.device)


def zeros_like(params: PyTree) -> PyTree:
    """A moment's start: zero for every tensor; other leaves stand for themselves."""
    register_dataclasses(params)
    return optree.tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, params)


def map_gradients(
    change: Callable[..., torch.Tensor], params: PyTree, grads: PyTree, constants: PyTree = None
) -> PyTree:
    """Apply a change to every gradient: (parameter, gradient[, constant]) → gradient. None stays None."""
    leaves, tree = optree.tree_flatten(params)
    (changed,) = map_leaves(lambda p, g, *constant: (change(p, g, *constant),), params, grads, constants=constants)
    rows = zip(leaves, tree.flatten_up_to(grads), tree.flatten_up_to(changed), strict=True)
    return tree.unflatten([new if is_trained(leaf) and old is not None else old for leaf, old, new in rows])


def map_leaves(
    update: Callable[..., tuple[torch.Tensor, ...]], params: PyTree, *trees: PyTree, constants: PyTree = None
) -> tuple[PyTree, ...]:
    """Apply an update to every floating or complex parameter with its gradient and state; returns a tree per result.

    A complex parameter is given to it as pairs of real numbers, and so are its gradient and state. Leaves that are
    neither stay as they are, and so do parameters with None for a gradient.

    Args:
        update: (parameter, gradient, state…[, constant]) → (new parameter, new state…).
        params: the parameters.
        trees: the gradients, then the trees of the state.
        constants: what the update takes after the state and does not return, one per parameter.
    """
    leaves, tree = optree.tree_flatten(params)
    columns = [tree.flatten_up_to(other) for other in trees]
    last = [(value,) for value in tree.flatten_up_to(constants)] if constants is not None else [()] * len(leaves)
    rows = []
    for constant, leaf, *others in zip(last, leaves, *columns, strict=True):
        if not is_trained(leaf) or others[0] is None:
            rows.append((leaf, *others[1:]))
        elif leaf.is_complex():
            rows.append(tuple(map(as_complex, update(*map(as_real, (leaf, *others)), *constant))))
        else:
            rows.append(update(leaf, *others, *constant))
    return tuple(tree.unflatten(column) for column in zip(*rows, strict=True))
