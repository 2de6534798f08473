"""Weight decay per parameter: rules from path patterns to a bool or a factor, or a function of path and leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import optree
from torch import Tensor

from sharding_specs import tree_paths
from sharding_specs.rules import matches

from ..functions import PyTree

__all__ = ["Decay", "decay_rates"]

Decay = Mapping[str, float] | Callable[[str, Tensor], float] | None


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
