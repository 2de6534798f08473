"""Leaves that are restored in another shape, such as the embedding of a vocabulary that has grown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import optree
import torch

from sharding_specs import tree_paths
from sharding_specs.rules import matches, nearest

from ..checkpoint import LeafLayout, tree_keys
from ..functions import PyTree
from ..optim import Optimizer
from ..requests import StateRequest
from .saved import SavedLeaves

Rule = str | Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


class Resize:
    """The rule of every leaf: of a parameter by its path; of optimizer state by the parameter that it belongs to."""

    def __init__(
        self, rules: Mapping[str, Rule], saved: SavedLeaves, optimizer: Optimizer, requests: Sequence[StateRequest]
    ) -> None:
        paths = tree_paths(saved.params)
        self._paths = dict(zip(tree_keys(saved.params), paths, strict=True))
        self._rules, self._owners, self._copies = rules, saved.owners, set[str]()
        self._requests = requests
        if any(map(callable, rules.values())):
            self._copies = copies(optimizer, saved.params)
        for pattern, rule in rules.items():
            if rule != "zeros" and not callable(rule):
                raise ValueError(f"resize={{{pattern!r}: {rule!r}}}: it is 'zeros', or a function of (old, shape)")
            if not any(matches(pattern, path) for path in paths):
                close = ", ".join(map(repr, nearest(pattern, paths)))
                raise ValueError(f"resize: {pattern!r} matches no parameter; the nearest are {close}")

    def rule(self, leaf: LeafLayout) -> Rule | None:
        """Return the rule of a leaf, None if there is none. State that is no copy of the parameter gets zeros."""
        own = (each.resize_rule() for each in self._requests if each.owns(leaf.key))
        if (by_request := next(own, None)) is not None:
            return by_request
        name = f"{leaf.kind}/{leaf.key}"
        path = self._paths.get(self._owners.get(name, ""))
        rules = (rule for pattern, rule in self._rules.items() if path is not None and matches(pattern, path))
        found = next(rules, None)
        return found if leaf.kind == "params" or name in self._copies or found is None else "zeros"


def copies(optimizer: Optimizer, params: PyTree) -> set[str]:
    """Return the names of the state that begins with the values of the parameters, such as an average of them."""

    def first(value: int) -> PyTree:
        def tiny(leaf: PyTree) -> PyTree:
            return torch.full((1,) * leaf.ndim, value, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf

        return optimizer.init(optree.tree_map(tiny, params))

    zeros, ones = first(0), first(1)
    rows = zip(tree_keys(zeros), *map(optree.tree_leaves, (zeros, ones)), strict=True)
    return {f"optimizer/{key}" for key, zero, one in rows if isinstance(zero, torch.Tensor) and not zero.equal(one)}


def resized(rule: Callable[..., torch.Tensor], old: torch.Tensor, leaf: LeafLayout) -> torch.Tensor:
    """Return the full leaf that a function makes of the old one."""
    new = rule(old, leaf.shape)
    if not isinstance(new, torch.Tensor) or new.shape != leaf.shape:
        made = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, torch.Tensor) else f"a {type(new).__name__}"
        raise ValueError(f"resize: the function for {leaf} returned {made}; its shape in this step is {leaf.shape}")
    return new.detach()
