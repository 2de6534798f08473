"""Optimizers as two pure functions: `init(params) -> state`, `update(grads, state, params) -> (params, state)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch

from sharding_specs import register_dataclasses

from ..functions import PyTree, SpecTree
from ..ir import as_complex, as_real, is_trained
from ..tracing import needs_values
from .host_rates import rate_on_host

Schedule = float | Callable[[torch.Tensor], Any]


class Optimizer(NamedTuple):
    """A pair of pure functions.

    A state has subtrees with the structure of the parameters (the moments). A leaf of such a subtree with the shape of
    its parameter has the layout of the parameter. The rest of the state is replicated. `update` is written for full
    parameters. `train_step` partitions it, unless `elementwise` or `specs` declares that it works on shards. Adafactor
    has `specs`: its row and column means have the layouts of those dims of the parameters.

    A parameter that does not affect the loss has a gradient of zeros here. `train_step` keeps its old value regardless
    of the result of `update`. It also keeps its old state, where a subtree with the structure of the parameters has a
    leaf of the shape of the parameter. A step count belongs to all parameters, so it is still incremented.

    Attributes:
        init: params → state.
        update: (gradients, state, params) → (new params, new state).
        specs: (params, their specs) → specs of the state. If it is set, `update` gets shards, and the specs of the
            parameters as a fourth argument. The specs define the axes that a sum over a dim must be reduced over.
        constants: params → constants that differ between parameters, such as the weight decay. It returns a tree with
            one number (or hashable value) per parameter, or one for all. It is called with full parameters, including
            stacks of layers. `update` gets the result as the keyword argument `constants`. It declares that `update`
            is elementwise, as `elementwise` does; concatenated parameters have equal constants.
        frozen: params → a tree with one bool per parameter. Frozen parameters have no gradient and are not updated.
        lr: the learning rate, or its schedule, for `metrics.lr`. With several, a dict.
        elementwise: whether each new element depends only on elements at the same position and on replicated scalars.
            Then `update` may be called on shards, on single layers of a stack (`fp.pipeline`), and on concatenated
            parameters (`fp.zero(1, "data", layout="flat")`). `train_step` checks it on small tensors;
            `fp.testing.assert_elementwise` is that check.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[..., tuple[PyTree, PyTree]]
    specs: Callable[[PyTree, PyTree], SpecTree] | None = None
    constants: Callable[[PyTree], PyTree] | None = None
    frozen: Callable[[PyTree], PyTree] | None = None
    lr: Schedule | Mapping[str, PyTree] | None = None
    elementwise: bool = False

    def __repr__(self) -> str:
        name = getattr(self.update, "__qualname__", type(self.update).__name__)
        return f"Optimizer({name.partition('.<locals>')[0]})"


class EMAState(NamedTuple):
    """State of `ema`."""

    step: torch.Tensor  # () number of updates done
    inner: PyTree  # of the optimizer
    average: PyTree  # like params


class DelayedState(NamedTuple):
    """State of `delayed`."""

    step: torch.Tensor  # () number of gradients that were taken
    inner: PyTree  # of the optimizer
    gradient: PyTree  # of the last step, like params


class Row(tuple[PyTree, ...]):
    """Constants of one parameter: a leaf of a tree, which a plain tuple is not."""


def is_declared_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer declares that its update of slices is the slice of its update."""
    declared = getattr(optimizer, "elementwise", False)  # a user's own pair may lack it
    return bool(declared) or getattr(optimizer, "constants", None) is not None


def clip_value(optimizer: Optimizer, bound: float) -> Optimizer:
    """Return an optimizer that first clamps every element of the gradients to [-bound, bound].

    It needs no sum over ranks, so it is correct under every sharding. `train_step(clip=…)` bounds the global norm
    instead, and does so before this. Real and imaginary components of complex gradients are clamped separately.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.clip_value(fp.optim.sgd(1.0), 0.5)
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.update({"w": torch.tensor([3.0, 0.25])}, optimizer.init(params), params)[0]
    {'w': tensor([0.5000, 0.7500])}

    Args:
        optimizer: the optimizer.
        bound: largest absolute value that is not changed.

    Returns:
        An optimizer with the same state.

    Raises:
        ValueError: if `bound` is not positive.
    """
    if not bound > 0:
        raise ValueError(f"clip_value(bound={bound!r}): the bound must be positive")

    def update(grads: PyTree, state: PyTree, params: PyTree, *specs: SpecTree, **own: PyTree) -> tuple[PyTree, PyTree]:
        (clipped,) = map_leaves(lambda grad, _: (grad.clamp(-bound, bound),), grads, grads)
        return optimizer.update(clipped, state, params, *specs, **own)

    return optimizer._replace(update=update)


def learning_rate(lr: Schedule, step: torch.Tensor) -> torch.Tensor:
    """Return the rate of a step (0 for the first) as a float64 scalar. In float32, 0.1 would have an error of 1e-9.

    A function that cannot be traced, because it needs the value of `step`, is called on the host when the program runs.
    """
    if not callable(lr):
        return torch.as_tensor(lr, dtype=torch.float64, device=step.device)
    try:
        rate = lr(step.double())
    except Exception as error:
        if not needs_values(error):
            raise
        return rate_on_host(lr, step)
    if isinstance(rate, torch.Tensor):
        return rate.to(step.device, torch.float64)
    return torch.as_tensor(rate, dtype=torch.float64, device=step.device)


def scheduled(value: Schedule, step: torch.Tensor) -> Any:
    return learning_rate(value, step) if callable(value) else value


def scheduled_rates(optimizer: Optimizer, state: PyTree) -> PyTree:
    """Return the scheduled rates of the next update, in the tree of `optimizer.lr`, with None for constant rates."""

    def of(lr: PyTree, state: PyTree) -> PyTree:
        while isinstance(state, (EMAState, DelayedState)):
            state = state.inner
        if isinstance(lr, Mapping):
            return {pattern: of(each, state.groups[pattern]) for pattern, each in lr.items()}
        return learning_rate(lr, state.step) if callable(lr) else None

    return of(getattr(optimizer, "lr", None), state)


def rates(optimizer: Optimizer, scheduled: PyTree) -> PyTree:
    def of(lr: PyTree, found: PyTree) -> PyTree:
        if isinstance(lr, Mapping):
            return {pattern: of(each, found and found[pattern]) for pattern, each in lr.items()}
        return found if lr is None or callable(lr) else torch.tensor(lr, dtype=torch.float64, device="cpu")

    return of(getattr(optimizer, "lr", None), scheduled)


def zeros_like(params: PyTree) -> PyTree:
    register_dataclasses(params)
    return optree.tree_map(lambda leaf: torch.zeros_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, params)


def map_leaves(
    update: Callable[..., tuple[PyTree, ...]], params: PyTree, *trees: PyTree, constants: PyTree = None
) -> tuple[PyTree, ...]:
    """Apply `update(parameter, gradient, state…[, constant]) -> (new parameter, new state…)` to trees of them.

    The update gets a complex parameter, its gradient and its state as pairs of real numbers. Leaves that are neither
    floating-point nor complex are not changed, and neither are parameters with a gradient of None.
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
    found = zip(*rows, strict=True) if rows else [()] * len(trees)  # one result per tree, without parameters too
    return tuple(map(tree.unflatten, found))
