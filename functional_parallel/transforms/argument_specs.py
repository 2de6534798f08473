"""Specs of the arguments of a function, from rules or trees of specs as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import optree
import torch

from sharding_specs import P, RuleMatch, SpecError, as_spec, broadcast_specs, match_rules, require_dims, tree_paths
from sharding_specs.rules import nearest

from ..functions import BufferTree, PyTree, SpecTree, refuse_idle_states, refuse_unknown_axes
from ..ir import Source, warn_at
from .as_code import as_code

Rules = Any  # pattern → spec, a list of such pairs, or a tree of specs

_MOSTLY, _FEW = 0.5, 1 << 20  # share and bytes of replicated parameters that rules may leave without a warning


def parameter_specs(params: PyTree, specs: Rules, axis: str, who: str, source: Source | None) -> SpecTree:
    """Return the specs of parameters, by rules or a spec tree. Warn at `source` of unused rules for this axis."""
    match = matched(specs, params, who)
    if told := _mostly_whole(specs, params, match, axis):
        warn_at(source, f"{who}: {told}")
    said = dict(specs.items() if isinstance(specs, Mapping) else specs) if match.unused else {}
    for pattern in match.unused:
        if axis in as_spec(said[pattern]).axes:
            near = ", ".join(nearest(pattern, tree_paths(params)))
            warn_at(
                source,
                f"{who}: rule {pattern!r} finds no parameter, so it splits none; the nearest are {near}. If the "
                f"model need not have it, write sharding_specs.optional({pattern!r})",
            )
    require_dims(params, match.specs, "the parameters")
    refuse_idle_states((match.specs,), who, axis)
    return match.specs


def _mostly_whole(specs: Rules, tree: PyTree, match: RuleMatch, axis: str) -> str:
    rules = list(specs.items() if isinstance(specs, Mapping) else specs) if isinstance(match, _ByRules) else []
    named = [(pattern, spec) for pattern, spec in rules if pattern.strip("*/.")]
    if not any(axis in as_spec(spec).axes for _, spec in named):
        return ""
    rest = set(match_rules(named, tree).unmatched)
    sizes = {
        path: leaf.numel() * leaf.element_size()
        for path, leaf in zip(tree_paths(tree), optree.tree_leaves(tree), strict=True)
        if isinstance(leaf, torch.Tensor)
    }
    whole = sorted(rest & sizes.keys(), key=lambda path: -sizes[path])
    held = sum(sizes[path] for path in whole)
    share = held / max(sum(sizes.values()), 1)
    if share <= _MOSTLY or held < _FEW:
        return ""
    return (
        f"the rules leave {share:.0%} of the bytes of the parameters replicated over {axis!r}, as no pattern but '*' "
        f"matches {', '.join(whole[:3])}{f' and {len(whole) - 3} more' if len(whole) > 3 else ''}. Give rules for "
        "them; P() keeps one replicated"
    )


class _ByRules(RuleMatch):
    """Match of rules, not of a tree of specs."""


def matched(specs: Rules, tree: PyTree, who: str) -> RuleMatch:
    """Match rules, or a tree of specs, with the parameters. A tree of specs has no unused patterns."""
    flat = isinstance(specs, Mapping) and all(isinstance(spec, (P, str)) for spec in specs.values())  # valid as either
    pairs = isinstance(specs, (list, tuple)) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in specs)
    if flat or pairs:
        return _ByRules(*match_rules(specs, tree))
    return RuleMatch(broadcast_specs(specs, tree, name=f"the spec tree of {who}", what="the parameters"), [], [])


def only_axis(specs: SpecTree, axis: str, who: str) -> SpecTree:
    refuse_unknown_axes((specs,), who)
    return optree.tree_map(lambda spec: spec.only({axis}), specs)


def batch_arg_specs(args: tuple[PyTree, ...], batch: SpecTree, default: P | None = None) -> list[SpecTree]:
    """Return specs of the arguments after the parameters, if they are known. Buffers are replicated."""
    if len(args) > 1 and isinstance(args[1], BufferTree):
        return [P(), *batch_arg_specs((args[0], *args[2:]), batch, default)]
    if isinstance(batch, tuple):
        if len(args) > 1 and len(batch) != len(args) - 1:
            raise SpecError(
                f"batch={batch!r} gives specs for {len(batch)} arguments after the parameters, but the function is "
                f"called with {len(args) - 1}; give one for each, or one spec for all of them"
            )
        return list(batch[: len(args) - 1])
    if batch is not None:
        return [batch] * (len(args) - 1)
    return [optree.tree_map(lambda leaf: _with_batch(leaf, default), arg) for arg in args[1:]]


def batch_lies(batch: SpecTree, axis: str, default: str = "dim 0") -> str:
    text = default if batch is None else as_code(batch)
    return f"{text} over {axis!r}" if text else ""


def _with_batch(leaf: PyTree, spec: P | None) -> P:
    return spec if spec is not None and isinstance(leaf, torch.Tensor) and leaf.ndim else P()
