"""Hyperparameters that optimizers have in common: their range checks, and the weight decay of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
from torch import Tensor

from sharding_specs import tree_paths
from sharding_specs.rules import matches

from ..functions import PyTree, written_here
from ..ir import is_trained
from ..quantities import is_non_negative, is_number
from .optimizer import Schedule

Decay = Mapping[str, float] | Callable[[str, Tensor], float] | None


def require(
    optimizer: str, *, lr: Schedule = 0.0, betas: tuple[float, float] = (0.0, 0.0), **not_negative: float
) -> None:
    """Raise ValueError unless `lr` is a rate or a schedule, `betas` are in [0, 1), and the others are not negative.

    Invalid values would make training fail silently.
    """
    if not (callable(lr) or (isinstance(lr, torch.Tensor) and lr.ndim == 0) or is_non_negative(lr)):
        if instead := written_here(lr):
            raise ValueError(f"{optimizer}(lr=…): {instead}")
        raise ValueError(
            f"{optimizer}(lr={lr!r}): a learning rate is a number of at least 0, or a function of the number of "
            "updates done, such as fp.optim.schedules.cosine"
        )
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not (pair and all(is_number(beta) and 0 <= beta < 1 for beta in betas)):
        raise ValueError(f"{optimizer}(betas={betas!r}): give two numbers of at least 0 and less than 1")
    for name, value in not_negative.items():
        if not is_non_negative(value):
            raise ValueError(f"{optimizer}({name}={value!r}): give a number of at least 0")


def constants_of(betas: Any) -> Any:
    return tuple(0.0 if callable(beta) else beta for beta in betas) if isinstance(betas, (tuple, list)) else betas


def refuse(optimizer: str, is_wrong: Callable[[Tensor], bool], params: PyTree, reason: str) -> None:
    leaves = zip(tree_paths(params), optree.tree_leaves(params), strict=True)
    wrong = [path or "the parameter" for path, leaf in leaves if is_trained(leaf) and is_wrong(leaf)]
    if wrong:
        raise ValueError(f"{optimizer}: {', '.join(wrong)}: {reason}")


def decay_rates(weight_decay: float, decay: Decay, params: PyTree) -> PyTree:
    """Return the weight decay of every parameter, as a tree of numbers.

    >>> decay_rates(0.5, {"*/b": False}, {"layer": {"b": 0, "w": 0}})
    {'layer': {'b': 0.0, 'w': 0.5}}

    The factor of the first pattern that matches applies, and leaves without a match decay.
    """
    paths, leaves = tree_paths(params), optree.tree_leaves(params)
    if isinstance(decay, Mapping):
        unused = [pattern for pattern in decay if not any(matches(pattern, path) for path in paths)]
        if unused:
            raise ValueError(
                f"decay: no parameter matches {', '.join(map(repr, unused))}, so nothing would be spared by it; "
                f"correct the pattern or leave it out. The parameters are: {', '.join(paths)}"
            )
        factors = [next((f for pattern, f in decay.items() if matches(pattern, path)), 1.0) for path in paths]
    elif decay is not None:
        factors = [decay(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    else:
        factors = [1.0] * len(paths)
    return optree.tree_unflatten(optree.tree_structure(params), [weight_decay * float(f) for f in factors])
