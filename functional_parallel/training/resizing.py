"""Leaves that are restored in another shape, such as the embedding of a vocabulary that has grown."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from sharding_specs import tree_paths
from sharding_specs.rules import matches, nearest

from ..checkpoint import LeafLayout, tree_keys
from .saved import SavedLeaves

Rule = str | Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]


class Resize:
    """The rule of every leaf: of a parameter by its path; of optimizer state by the parameter to which it belongs."""

    def __init__(self, rules: Mapping[str, Rule], saved: SavedLeaves) -> None:
        paths = tree_paths(saved.params)
        self._paths = dict(zip(tree_keys(saved.params), paths, strict=True))
        self._rules, self._owners = rules, saved.owners
        for pattern, rule in rules.items():
            if rule != "zeros" and not callable(rule):
                raise ValueError(f"resize={{{pattern!r}: {rule!r}}}: it is 'zeros', or a function of (old, shape)")
            if not any(matches(pattern, path) for path in paths):
                close = ", ".join(map(repr, nearest(pattern, paths)))
                raise ValueError(f"resize: {pattern!r} matches no parameter; the nearest are {close}")

    def rule(self, leaf: LeafLayout) -> Rule | None:
        """Return the rule of a leaf, None if there is none. State gets zeros, whatever the parameter gets."""
        path = self._paths.get(self._owners.get(f"{leaf.kind}/{leaf.key}", ""))
        rules = (rule for pattern, rule in self._rules.items() if path is not None and matches(pattern, path))
        found = next(rules, None)
        return found if leaf.kind == "params" or found is None else "zeros"


def resized(rule: Callable[..., torch.Tensor], old: torch.Tensor, leaf: LeafLayout) -> torch.Tensor:
    """Return the full leaf that a function makes of the old one."""
    new = rule(old, leaf.shape)
    if not isinstance(new, torch.Tensor) or new.shape != leaf.shape:
        made = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, torch.Tensor) else f"a {type(new).__name__}"
        raise ValueError(f"resize: the function for {leaf} returned {made}; its shape in this step is {leaf.shape}")
    return new.detach()
