"""Optimizers composed of gradient transformations of one parameter, as in optax."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import optree
from torch import Tensor

from ..functions import PyTree, explain_keywords
from ..ir import scalar_beside
from .hyperparameters import Decay, decay_rates, require
from .optimizer import Optimizer, Row, Schedule, learning_rate, map_leaves, zeros_like

Constants = Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class Transformation:
    """Transformation of the update of a parameter, for `chain`.

    >>> import torch, functional_parallel as fp
    >>> rounded = fp.optim.Transformation(lambda step: lambda update, parameter: update.sign())
    >>> optimizer = fp.optim.chain(rounded, fp.optim.scale_by_learning_rate(0.5))
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.update({"w": torch.tensor([3.0, -0.1])}, optimizer.init(params), params)[0]
    {'w': tensor([0.5000, 1.5000])}

    A complex parameter is a real tensor with a last dim of size 2.

    Attributes:
        update: number of updates done, a scalar → function of one parameter: (update, parameter, moments…[, constant])
            → new update, or (new update, new moments…). The first update is the gradient.
        moments: number of moments. A moment is a tensor like the parameter, of zeros at first.
        constants: params → one hashable value per parameter, or one for all, which the function takes as its last
            argument. As in `Optimizer`, it declares that the function is elementwise.
        fused: (learning rate, `constants` of a weight decay or None) → transformation that returns the new parameter:
            this transformation, the decay and the rate in one op. A chain uses it if these follow.
        elementwise: whether the function is elementwise; see `Optimizer`. A chain is if all its transformations are.
    """

    update: Callable[[Tensor], Callable[..., Tensor | tuple[Tensor, ...]]]
    moments: int = 0
    constants: Constants | None = None
    fused: Callable[[Schedule, Constants | None], Transformation] | None = None
    elementwise: bool = False


@dataclass(frozen=True)
class _AddDecayedWeights(Transformation):
    pass


@dataclass(frozen=True, kw_only=True)
class _ScaleByLearningRate(Transformation):
    lr: Schedule


class ChainState(NamedTuple):
    """State of `chain`."""

    step: Tensor  # () number of updates done
    moments: tuple[PyTree, ...]  # each like params, in the order of the transformations


def chain(*transformations: Transformation) -> Optimizer:
    """Compose gradient transformations into an optimizer, as `optax.chain` does; the first changes the gradient.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.chain(fp.optim.trace(0.9), fp.optim.scale_by_learning_rate(0.5))
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([1.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.5000])}

    The last update is added to the parameter, so a chain that descends has a `scale_by_learning_rate`. A chain that
    ends in `add_decayed_weights` and `scale_by_learning_rate` is rounded as torch's decoupled weight decay:
    p ← p (1 − lr λ) − lr u. With `scale_by_adam` before these, or before the rate, it is one call of torch's kernel.

    Args:
        transformations: the transformations, in the order of their application to the gradient.

    Returns:
        An optimizer with the state `ChainState`.

    Raises:
        TypeError: if an argument is not a transformation.
    """
    for each in transformations:
        if not isinstance(each, Transformation):
            raise TypeError(f"chain takes transformations, such as fp.optim.scale_by_adam(), not {each!r}")
    return chained("chain", lambda step, *moments: ChainState(step, moments), *transformations)


def chained(name: str, keep: Callable[..., tuple[PyTree, ...]], *transformations: Transformation) -> Optimizer:
    declared = all(each.constants or each.elementwise for each in transformations)
    parts = _with_end(*transformations)
    count = sum(each.moments for each in parts)

    def rows(params: PyTree) -> PyTree:
        columns = [optree.broadcast_prefix(each.constants(params), params) for each in parts if each.constants]
        tree = optree.tree_structure(params)
        return tree.unflatten([Row(column[i] for column in columns) for i in range(tree.num_leaves)])

    def init(params: PyTree) -> PyTree:
        rows(params)  # raises for a pattern that matches nothing
        return keep(scalar_beside(params), *(zeros_like(params) for _ in range(count)))

    def update(grads: PyTree, state: PyTree, params: PyTree, constants: PyTree = None) -> tuple[PyTree, PyTree]:
        moments = state.moments if isinstance(state, ChainState) else state[1 : count + 1]
        constants = rows(params) if constants is None else constants
        new, *moments = map_leaves(_composed(parts, state.step), params, grads, *moments, constants=constants)
        return new, keep(state.step + 1, *moments)

    update.__qualname__ = name
    lr = next((each.lr for each in reversed(transformations) if isinstance(each, _ScaleByLearningRate)), None)
    return Optimizer(init, update, constants=rows if declared else None, lr=lr)


def _composed(parts: Iterable[Transformation], step: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    functions = [(each, each.update(step)) for each in parts]

    def one(parameter: Tensor, update: Tensor, *rest: PyTree) -> tuple[Tensor, ...]:
        moments, constants, new = iter(rest[:-1]), iter(rest[-1]), list[Tensor]()
        for each, function in functions:
            own = (*islice(moments, each.moments), *islice(constants, int(each.constants is not None)))
            found = function(update, parameter, *own)
            update, *kept = found if isinstance(found, tuple) else (found,)
            new += kept
        return update, *new

    return one


def _with_end(*parts: Transformation) -> tuple[Transformation, ...]:
    match parts:
        case (*rest, _AddDecayedWeights() as decay, _ScaleByLearningRate() as rate):
            constants = decay.constants
        case (*rest, _ScaleByLearningRate() as rate):
            constants = None
        case _:
            return (*parts, Transformation(lambda step: lambda update, parameter: parameter + update))
    fused = rest.pop().fused if rest and rest[-1].fused else None
    return (*rest, (fused or _descend)(rate.lr, constants))


def _descend(lr: Schedule, constants: Constants | None) -> Transformation:
    def update(step: Tensor) -> Callable[..., Tensor]:
        rate = learning_rate(lr, step)

        def one(update: Tensor, parameter: Tensor, decay: float = 0.0) -> Tensor:
            own = rate.to(parameter.dtype)
            return (parameter * (1 - own * decay) if decay else parameter) - own * update

        return one

    return Transformation(update, constants=constants)


@explain_keywords
def add_decayed_weights(weight_decay: float, decay: Decay = None) -> Transformation:
    """Add the weight decay λ p to the update: an L2 penalty before the moments, decoupled weight decay after them.

    Loshchilov & Hutter, arXiv 1711.05101, compare the two. It is `optax.add_decayed_weights`.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.chain(fp.optim.add_decayed_weights(0.5), fp.optim.scale_by_learning_rate(1.0))
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([0.25])}, optimizer.init(params), params)[0]
    {'w': tensor([0.2500])}

    Args:
        weight_decay: λ.
        decay: parameters that decay: path pattern → bool or factor, or a function of path and leaf; by default all.

    Returns:
        A transformation without moments.

    Raises:
        ValueError: for a λ that is out of range. The optimizer's `init` raises it for a pattern that matches nothing.
    """
    require("add_decayed_weights", weight_decay=weight_decay)

    def one(update: Tensor, parameter: Tensor, rate: float) -> Tensor:
        return update + rate * parameter if rate else update

    return _AddDecayedWeights(lambda step: one, 0, partial(decay_rates, weight_decay, decay))


def scale_by_learning_rate(lr: Schedule) -> Transformation:
    """Multiply the update by the negative learning rate, as `optax.scale_by_learning_rate` does.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.chain(fp.optim.scale_by_learning_rate(fp.optim.schedules.linear(0.5, 0.0, 10)))
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.update({"w": torch.tensor([1.0])}, optimizer.init(params), params)[0]
    {'w': tensor([0.5000])}

    Args:
        lr: learning rate, or a function from the number of updates done to the learning rate.

    Returns:
        A transformation without moments.

    Raises:
        ValueError: for a rate that is out of range.
    """
    require("scale_by_learning_rate", lr=lr)

    def update(step: Tensor) -> Callable[..., Tensor]:
        rate = -learning_rate(lr, step)
        return lambda update, parameter: rate.to(parameter.dtype) * update

    return _ScaleByLearningRate(update, lr=lr, elementwise=True)
