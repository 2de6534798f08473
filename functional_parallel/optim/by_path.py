"""Optimizers by the path of a parameter: groups of parameters with different optimizers, rates and decays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import optree

from sharding_specs import P, optional, tree_paths
from sharding_specs.rules import matches, nearest

from ..functions import PyTree, SpecTree
from .optimizer import Optimizer, Row, is_declared_elementwise
from .state_trees import like_params, tree_map_params

_LISTED = 8
_ELSEWHERE = 0  # in a moment of one group, the leaf of a parameter of another group


class PathSet(str):
    __slots__ = ("paths",)
    paths: frozenset[str]

    def __new__(cls, name: str, paths: Iterable[str]) -> PathSet:
        made = super().__new__(cls, name)
        made.paths = frozenset(paths)
        return made


def _matches(pattern: str, path: str) -> bool:
    return path in pattern.paths if isinstance(pattern, PathSet) else matches(pattern, path)


class ByPathState(NamedTuple):
    """State of `by_path`: the state of each optimizer, by its pattern.

    A moment has the structure of all parameters. It is 0, the Python number, for parameters of other groups.
    """

    groups: dict[str, PyTree]


def by_path(groups: Mapping[str, Optimizer | None]) -> Optimizer:
    """Return an optimizer that updates each parameter by the optimizer of the first pattern that matches its path.

    >>> import torch, functional_parallel as fp
    >>> optimizer = fp.optim.by_path({"*norm*": fp.optim.sgd(0.5), "embed": None, "*": fp.optim.sgd(1.0)})
    >>> params = {"embed": torch.ones(1), "norm": torch.ones(1), "w": torch.ones(1)}
    >>> optimizer.update(params, optimizer.init(params), params)[0]
    {'embed': tensor([1.]), 'norm': tensor([0.5000]), 'w': tensor([0.])}

    Each optimizer gets its parameters as a dict from path to parameter. Its state is sharded as if it were the
    only optimizer. `train_step(clip=…)` bounds the norm of the gradients of all groups together. `metrics.lr` is a dict
    from pattern to rate.

    Args:
        groups: path pattern → optimizer, in the order of precedence. None freezes parameters: they have no gradient,
            no state and no update. Patterns have the syntax of sharding rules, such as `"*/bias"`.

    Returns:
        An optimizer with the state `ByPathState`. It may be updated on shards and in flat vectors if all its optimizers
        may be. Its `init` raises ValueError for a parameter that no pattern matches, and for a pattern that is the
        first match of no parameter.

    Raises:
        TypeError: if a value is not an optimizer.
        ValueError: if nothing is trained, or if one optimizer works on shards by its own `specs` and another is
            neither elementwise nor has `specs`.
    """
    found = dict(groups)
    for pattern, each in found.items():
        if each is not None and not isinstance(each, Optimizer):
            raise TypeError(f"by_path({pattern!r}: {each!r}): the value is an fp.optim.Optimizer, or None to freeze")
    trained = {pattern: each for pattern, each in found.items() if each is not None}
    if not trained:
        raise ValueError("by_path: every pattern freezes its parameters (None), so there is nothing to train")
    return _ByPath(found, trained).optimizer()


@dataclass(frozen=True)
class _ByPath:
    patterns: dict[str, Optimizer | None]
    trained: dict[str, Optimizer]

    def optimizer(self) -> Optimizer:
        optimizers = self.trained.values()
        update = partial(self.update)
        update.__qualname__ = "by_path"  # type: ignore[attr-defined]
        own_specs = any(each.specs for each in optimizers)
        if own_specs:
            self._require_shards()
        return Optimizer(
            self.init,
            update,
            specs=self.specs if own_specs else None,
            constants=self.constants if all(map(is_declared_elementwise, optimizers)) else None,
            frozen=self.frozen if None in self.patterns.values() else None,
            lr={pattern: each.lr for pattern, each in self.trained.items()},
        )

    def _require_shards(self) -> None:
        wrong = [pattern for pattern, each in self.trained.items() if not (each.specs or is_declared_elementwise(each))]
        if wrong:
            sharded = next(pattern for pattern, each in self.trained.items() if each.specs)
            raise ValueError(
                f"by_path: the optimizer of {sharded!r} has `specs`, so all get shards. That of "
                f"{', '.join(map(repr, wrong))} has neither these nor elementwise=True: give it one if it can do that"
            )

    def _assigned(self, params: PyTree) -> list[str]:
        paths = tree_paths(params)
        if paths == [""]:
            raise ValueError("by_path takes a tree of parameters, such as a dict; these parameters are one tensor")
        first = [next((pattern for pattern in self.patterns if _matches(pattern, path)), None) for path in paths]
        missing = [path for path, pattern in zip(paths, first, strict=True) if pattern is None]
        if missing:
            more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            raise ValueError(
                f"by_path: no pattern matches {', '.join(missing[:_LISTED])}{more}; the patterns are "
                f"{', '.join(map(repr, self.patterns))}. Add '*' as the last pattern; its value None freezes the rest"
            )
        for pattern in self.patterns:
            if pattern not in first and not isinstance(pattern, optional) and pattern != "*":
                why = "patterns before it match all that it matches; move it up"
                if not any(_matches(pattern, path) for path in paths):
                    why = f"it matches none; the nearest paths are {', '.join(nearest(pattern, paths))}"
                raise ValueError(f"by_path: {pattern!r} is the first match of no parameter: {why}")
        return [each for each in first if each is not None]

    def _groups(self, params: PyTree, assigned: Sequence[str | None]) -> dict[str, _Group]:
        members: dict[str, dict[str, int]] = {pattern: {} for pattern in self.trained}
        for number, (path, pattern) in enumerate(zip(tree_paths(params), assigned, strict=True)):
            if pattern in members:
                members[pattern][path] = number
        return {pattern: _Group(own, optree.tree_structure(params)) for pattern, own in members.items()}

    def init(self, params: PyTree) -> ByPathState:
        groups = self._groups(params, self._assigned(params)).items()
        return ByPathState({name: group.spread(self.trained[name].init(group.of(params))) for name, group in groups})

    def update(
        self, grads: PyTree, state: ByPathState, params: PyTree, *specs: SpecTree, constants: PyTree | None = None
    ) -> tuple[PyTree, ByPathState]:
        leaves, tree = optree.tree_flatten(params)
        # In a flat layout, a leaf that is not trained has None in place of a row of constants
        rows = None if constants is None else [row or (None, None) for row in tree.flatten_up_to(constants)]
        assigned = self._assigned(params) if rows is None else [pattern for pattern, _ in rows]
        states = {}
        for pattern, group in self._groups(params, assigned).items():
            optimizer, own = self.trained[pattern], group.of(params)
            further = [group.of(spec) for spec in specs] if optimizer.specs else []
            own_rows = None if rows is None or optimizer.constants is None else rows
            named = {"constants": {path: own_rows[i][1] for path, i in group.members.items()}} if own_rows else {}
            before = tree_map_params(group.of, state.groups[pattern], group.structure)
            new, after = optimizer.update(group.of(grads), before, own, *further, **named)
            if optree.tree_structure(new) != optree.tree_structure(own):
                raise ValueError(f"by_path: the update of {pattern!r} returned other parameters than {', '.join(own)}")
            for path, number in group.members.items():
                leaves[number] = new[path]
            states[pattern] = group.spread(after)
        return tree.unflatten(leaves), ByPathState(states)

    def constants(self, params: PyTree) -> PyTree:
        tree = optree.tree_structure(params)
        rows = [Row((None, None))] * tree.num_leaves
        for pattern, group in self._groups(params, self._assigned(params)).items():
            own, decide = group.of(params), self.trained[pattern].constants
            found = optree.tree_broadcast_prefix(0 if decide is None else decide(own), own)
            for path, number in group.members.items():
                rows[number] = Row((pattern, found[path]))
        return tree.unflatten(rows)

    def specs(self, params: PyTree, specs: SpecTree) -> ByPathState:
        found = {}
        for pattern, group in self._groups(params, self._assigned(params)).items():
            optimizer, own, placed = self.trained[pattern], group.of(params), group.of(specs)
            held = optimizer.specs(own, placed) if optimizer.specs else like_params(optimizer.init(own), own, placed)
            found[pattern] = group.spread(held, P())
        return ByPathState(found)

    def frozen(self, params: PyTree) -> PyTree:
        flags = [self.patterns[pattern] is None for pattern in self._assigned(params)]
        return optree.tree_structure(params).unflatten(flags)


@dataclass(frozen=True)
class _Group:
    members: dict[str, int]
    structure: Any

    def of(self, tree: PyTree) -> dict[str, Any]:
        leaves = self.structure.flatten_up_to(tree)
        return {path: leaves[number] for path, number in self.members.items()}

    def spread(self, state: PyTree, elsewhere: Any = _ELSEWHERE) -> PyTree:
        own = optree.tree_structure(self.members)

        def is_own(x: Any) -> bool:
            return isinstance(x, dict) and optree.tree_structure(x) == own

        def spread(x: Any) -> PyTree:
            if not is_own(x):
                return x
            leaves = [elsewhere] * self.structure.num_leaves
            for path, number in self.members.items():
                leaves[number] = x[path]
            return self.structure.unflatten(leaves)

        return optree.tree_map(spread, state, is_leaf=is_own)
