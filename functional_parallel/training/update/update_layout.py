"""Conversions between the storage, compute and update layouts of a parameter.

ZeRO stages 1 and 2 replicate parameters and split the optimizer's work. A reduce-scatter distributes the gradients, and
an all-gather collects the new parameters.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from typing import TypeVar

import optree
import torch

from sharding_specs import P

from ...collectives import all_gather, axis_size, pcast, pscatter, psum, psum_scatter
from ...functions import PyTree, SpecTree
from ...ops import sum_of_squares

T = TypeVar("T")


def at_rest(spec: P) -> P:
    """Return the storage layout of a parameter, between steps, from its compute layout."""
    return spec.without(spec.reduced)


def as_trained(param: T, trained: torch.Tensor) -> T | torch.Tensor:
    """Cast a stored parameter to the dtype in which it is trained."""
    return param.to(trained.dtype) if isinstance(param, torch.Tensor) and param.dtype != trained.dtype else param


def into_compute(param: torch.Tensor, spec: P) -> torch.Tensor:
    """Cast a parameter to Reduced over the axes where the plan wants its gradient as partial sums."""
    moved = spec.reduced and isinstance(param, torch.Tensor)
    return pcast(param, tuple(sorted(spec.reduced)), to="reduced") if moved else param


def _new_splits(update: P, kept: P) -> list[tuple[str, int]]:
    """Return (axis, dim) for each axis that splits the update but not the parameter. Outer axes of a dim are first."""
    return [(axis, dim) for dim, axes in enumerate(update.dim_axes()) for axis in axes if axis not in kept.axes]


def reduce_gradient(gradient: torch.Tensor | None, update: P, kept: P, compute: P) -> torch.Tensor | None:
    """Sum partial gradients. Where the update is split, keep a slice. A leaf without a gradient stays None."""
    if gradient is None:
        return None
    for axis, dim in _new_splits(update, kept):
        gradient = psum_scatter(filled(gradient, axis, dim, update), axis, dim)
    rest = tuple(sorted(compute.reduced - update.axes))
    return psum(gradient, rest) if rest else gradient


def shard_for_update(param: T, update: P, kept: P) -> T | torch.Tensor:
    """Return the shard of a parameter that a rank updates."""
    if not isinstance(param, torch.Tensor):
        return param
    shard: torch.Tensor = param
    for axis, dim in _new_splits(update, kept):
        shard = pscatter(filled(shard, axis, dim, update), axis, dim)
    return shard


def gather_updated(param: torch.Tensor, update: P, kept: P) -> torch.Tensor:
    """Gather a parameter from its updated shards, without padding."""
    for axis, dim in reversed(_new_splits(update, kept)):
        param = all_gather(param, axis, dim, to="invariant")
        param = param.narrow(dim, 0, update.padded[dim]) if dim in update.padded else param
    return param


def filled(x: torch.Tensor, axes: str | tuple[str, ...], dim: int, update: P) -> torch.Tensor:
    """Pad a dim with zeros if its size is not divisible by the size of the axis."""
    if dim not in update.padded:
        return x
    missing = -x.shape[dim] % axis_size(axes)
    return torch.nn.functional.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing])


def global_norm(gradients: PyTree, specs: SpecTree, owners: Collection[str] = ()) -> torch.Tensor:
    """Return the norm of all gradients. Each element is counted once, with one psum per set of axes.

    Along the axes of `owners` one rank holds all shards. It adds their squares in the order in which a psum does.
    """
    counted: dict[tuple[str, ...], list[tuple[torch.Tensor, P]]] = {}
    leaves = optree.tree_leaves(specs, none_is_leaf=True)  # a parameter that is None has no spec
    for gradient, spec in zip(optree.tree_leaves(gradients, none_is_leaf=True), leaves, strict=True):
        if gradient is not None:
            counted.setdefault(tuple(sorted(spec.axes)), []).append((gradient, spec))
    if not counted:
        raise ValueError("no parameter is a floating tensor, so there is nothing to train")
    sums = [_summed_squares(counted[axes], axes, owners) for axes in sorted(counted)]
    total = sums[0]
    for square in sums[1:]:
        total = total + square.to(total.dtype)
    return total.sqrt()


def _summed_squares(
    gradients: Sequence[tuple[torch.Tensor, P]], axes: Sequence[str], owners: Collection[str]
) -> torch.Tensor:
    split = [axis for axis in axes if axis not in owners]
    own = [axis for axis in axes if axis in owners]
    shards = [[gradient] if not own else _shards(gradient, spec, own[0]) for gradient, spec in gradients]
    square = functools.reduce(operator.add, (sum_of_squares(of_rank) for of_rank in zip(*shards, strict=True)))
    return psum(square, split) if split else square


def _shards(gradient: torch.Tensor, spec: P, axis: str) -> list[torch.Tensor]:
    """Return the shards of all ranks along an axis."""
    dim = next(dim for dim, axes in enumerate(spec.dim_axes()) if axis in axes)
    return [shard.contiguous() for shard in filled(gradient, axis, dim, spec).chunk(axis_size(axis), dim)]
