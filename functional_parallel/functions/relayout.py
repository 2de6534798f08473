"""Conversion of a rank's shard from one layout on a mesh to another.

The layouts differ in the axes of their dims, in padding, in partial sums and in owners. Axes that both layouts begin a
dim with stay. The others are moved, added and removed, in this order, so that shards stay small:

| change of an axis | collective |
|---|---|
| from one dim to another | `all_to_all` |
| added to a dim | `pscatter`, a slice; `psum_scatter` of partial sums; `scatter` by an owner |
| removed from a dim | `all_gather`; `gather` to an owner |
| partial sums to replicated | `psum` |
| replicated to `reduced` | `pcast` |
| owner to replicated | `broadcast` |

A stored shard is fetched before these changes, and stored after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TypeVar

import optree
import torch

from sharding_specs import P, SpecError, broadcast_specs
from sharding_specs.blocks import Blocks, by_block, by_rank, nested

from ..collectives import (
    all_gather,
    all_to_all,
    apply_primitive,
    axis_size,
    pcast,
    pscatter,
    psum,
    psum_scatter,
)
from .local_function import axis_mesh
from .request import PyTree, SpecTree

T = TypeVar("T")
_ONE: Blocks = 1


def relayout(x: PyTree, held: SpecTree, wanted: SpecTree) -> PyTree:
    """Convert a rank's shards from one layout to another on the same mesh, inside a function on shards.

    It is DTensor's `redistribute`, with typed collectives: derivatives pass through it.

    >>> import torch, functional_parallel as fp
    >>> from sharding_specs import Mesh, P
    >>> @fp.shard_map(Mesh(data=2), in_specs=P("data"), out_specs=P(None, "data"))
    ... def columns(x):
    ...     return fp.relayout(x, P("data"), P(None, "data"))
    >>> columns(torch.arange(4).view(2, 2)), columns.program.counts()
    (tensor([[0, 1],
            [2, 3]]), {('all_to_all', ('data',)): 1})

    Args:
        x: pytree of tensors. Other leaves stay.
        held: spec of each tensor, or a pytree prefix of specs.
        wanted: spec of each result, or a pytree prefix. Padding is added and removed as `padded=` of both declares.

    Returns:
        A pytree of the shards in the wanted layouts.

    Raises:
        SpecError: if a spec does not fit its tensor, or if `held` has no conversion to `wanted`: from `reduced`, to
            `unreduced`, or to an owner from anything but shards.
    """

    return optree.tree_map(relayout_leaf, x, broadcast_specs(held, x), broadcast_specs(wanted, x))


def relayout_leaf(x: T, held: P, wanted: P) -> T | torch.Tensor:
    """Convert a rank's shard from one layout to another. Other values than tensors stay."""
    if not isinstance(x, torch.Tensor) or held == wanted:
        return x
    change = _Relayout(x, held, wanted)
    kept, has = (held.entered(), wanted.entered()) if held.memory == wanted.memory and change.is_local else (None, None)
    change.x = held.fetch(x, until=kept)
    return wanted.store(change.result(), since=has)


class _Relayout:
    """Conversion of one shard. `now` and `goal` have the factors of each dim."""

    def __init__(self, x: torch.Tensor, held: P, wanted: P) -> None:
        self.x, self.held, self.wanted = x, held, wanted
        if max(len(held.dims), len(wanted.dims)) > x.ndim:
            raise SpecError(f"relayout: {held!r} and {wanted!r} have more dims than a tensor of shape {tuple(x.shape)}")
        alone = wanted.owner.keys() - held.owner.keys() - held.axes
        if held.reduced - wanted.reduced or wanted.unreduced - held.unreduced or alone:
            raise SpecError(
                f"relayout: {held!r} has no conversion to {wanted!r}: `reduced` is kept, `unreduced` is not added, and "
                "an owner gets shards"
            )
        self.partial = set(held.unreduced - wanted.unreduced)
        self.owners = {axis: rank for axis, rank in held.owner.items() if wanted.owner.get(axis) != rank}
        self.now, self.goal = ([[*dim] for dim in _dims(spec, x.ndim)] for spec in (held, wanted))
        self.stale = [len(self.now[dim]) - self._common(dim) for dim in range(x.ndim)]  # factors to remove

    @property
    def is_local(self) -> bool:
        """Whether each rank computes it from its own shard, in any memory."""
        return not (any(self.stale) or self.partial or self.owners)

    def _common(self, dim: int) -> int:
        """Return the number of factors that stay: those at the start, which have the same blocks in both layouts."""
        pairs = enumerate(zip(self.now[dim], self.goal[dim], strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(len(self.now[dim]), len(self.goal[dim])))

    def result(self) -> torch.Tensor:
        while self._move() or self._add() or self._remove():
            pass
        if self.partial:
            self.x = psum(self.x, tuple(sorted(self.partial)))
        for axis, rank in self.owners.items():
            self.x = apply_primitive("broadcast", self.x, (axis,), rank, "invariant")
        if casts := tuple(sorted(self.wanted.reduced - self.held.reduced - self.held.axes)):
            self.x = pcast(self.x, casts, to="reduced")
        return self.x

    def _move(self) -> bool:
        """Move an axis from the end of one dim to the end of another."""
        for source, stale in enumerate(self.stale):
            axis = self.now[source][-1] if stale else None
            for target in range(self.x.ndim):
                if isinstance(axis, str) and self._next(target) == (axis, 1) and _outer(self.now[source]) == 1:
                    self._pad(target, axis)
                    self.x = all_to_all(self.x, axis, target, source)
                    self._split(target)
                    self._pop(source)
                    return True
        return False

    def _add(self) -> bool:
        """Split a dim by an axis that splits no other one."""
        used = {factor for dim in self.now for factor in dim}
        for dim in range(self.x.ndim):
            axis, outer = self._next(dim)
            if axis and axis not in used:
                self._pad(dim, axis)
                split: Callable[..., torch.Tensor] = psum_scatter if axis in self.partial else pscatter
                if axis in self.owners:
                    split = partial(_with_owner, "scatter", self.owners.pop(axis))
                self.partial.discard(axis)
                self.x = _blockwise(split, self.x, axis, dim, outer)
                self._split(dim)
                return True
        return False

    def _remove(self) -> bool:
        """Gather the innermost axis of the last dim that has one too many."""
        dim = next((dim for dim in reversed(range(self.x.ndim)) if self.stale[dim]), None)
        if dim is None:
            return False
        axis, outer, wanted = str(self.now[dim][-1]), _outer(self.now[dim]), self.wanted
        if axis in wanted.owner:
            join: Callable[..., torch.Tensor] = partial(_with_owner, "gather", wanted.owner[axis])
        else:
            join = partial(all_gather, to="reduced" if axis in wanted.reduced else "invariant")
        self.x = _blockwise(join, self.x, axis, dim, outer, joins=True)
        self._pop(dim)
        return True

    def _next(self, dim: int) -> tuple[str, Blocks]:
        """Return the next axis that splits a dim, and the number of blocks around it; "" if there is none."""
        ahead = self.goal[dim][len(self.now[dim]) :]
        if self.stale[dim] or not ahead:
            return "", 1
        axis = next(factor for factor in ahead if isinstance(factor, str))
        return axis, _outer(self.goal[dim][: self.goal[dim].index(axis) + 1])

    def _split(self, dim: int) -> None:
        axis, _ = self._next(dim)
        self.now[dim] = self.goal[dim][: self.goal[dim].index(axis) + 1]

    def _pop(self, dim: int) -> None:
        """Forget the last axis of a dim, the numbers before it, and the padding of the blocks that it split."""
        axis = str(self.now[dim].pop())
        self.stale[dim] -= 1
        while self.stale[dim] and not isinstance(self.now[dim][-1], str):
            self.now[dim].pop()
            self.stale[dim] -= 1
        if dim in self.held.padded:
            self.x = self.x.narrow(dim, 0, self.held.blocks(dim, axis_mesh())[axis])

    def _pad(self, dim: int, axis: str) -> None:
        """Pad a dim with zeros, so that an axis splits it."""
        missing = -self.x.shape[dim] % axis_size(axis) if dim in self.wanted.padded else 0
        if missing:
            self.x = torch.nn.functional.pad(self.x, [0, 0] * (self.x.ndim - 1 - dim) + [0, missing])


def _dims(spec: P, count: int) -> Sequence[tuple[str | Blocks, ...]]:
    return [*spec.dims, *[()] * (count - len(spec.dims))]


def _outer(factors: Sequence[str | Blocks]) -> Blocks:
    """Return the blocks of a rank around its slices by the last axis. Axes before it have one each."""
    return reduce(nested, (factor for factor in factors if not isinstance(factor, str)), _ONE)


def _with_owner(name: str, owner: int, x: torch.Tensor, axis: str, dim: int) -> torch.Tensor:
    return apply_primitive(name, x, (axis,), dim, owner)


def _blockwise(
    collective: Callable[..., torch.Tensor], x: torch.Tensor, axis: str, dim: int, outer: Blocks, joins: bool = False
) -> torch.Tensor:
    if outer == 1:
        return collective(x, axis, dim=dim)
    if isinstance(outer, int):
        return collective(x.unflatten(dim, (outer, -1)), axis, dim=dim + 1).flatten(dim, dim + 1)
    done = collective(x if joins else by_rank(x, dim, outer, axis_size(axis)), axis, dim=dim)
    return by_block(done, dim, outer, axis_size(axis)) if joins else done
