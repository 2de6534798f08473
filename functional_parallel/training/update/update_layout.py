"""Storage layout and dtype of a parameter in the loss, and the norm of gradients in the layouts of the update."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Sequence
from typing import TypeVar

import optree
import torch

from sharding_specs import P

from ...collectives import axis_size, psum
from ...functions import PyTree, SpecTree
from ...ops import sum_of_squares, to_device

T = TypeVar("T")


def as_trained(param: T, trained: torch.Tensor) -> T | torch.Tensor:
    """Cast a stored parameter to its training dtype."""
    return param.to(trained.dtype) if isinstance(param, torch.Tensor) and param.dtype != trained.dtype else param


def global_norm(gradients: PyTree, specs: SpecTree, owners: Collection[str] = ()) -> torch.Tensor:
    """Return the norm of all gradients. Each element is counted once, with one psum per set of axes.

    Along the axes of `owners` one rank holds all shards. It adds their squares in the order of a psum.
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
    one_by_one = len({spec.memory for _, spec in gradients}) > 1  # the same sum, of tensors in several memories
    ranks = zip(*shards, strict=True)
    parts = (each for of_rank in ranks for each in (zip(of_rank, strict=True) if one_by_one else [of_rank]))
    square = functools.reduce(operator.add, (to_device(sum_of_squares(part)) for part in parts))
    return psum(square, split) if split else square


def _shards(gradient: torch.Tensor, spec: P, axis: str) -> list[torch.Tensor]:
    """Return the shards of all ranks along an axis."""
    dim = next(dim for dim, axes in enumerate(spec.dim_axes()) if axis in axes)
    missing = -gradient.shape[dim] % axis_size(axis)
    padded = torch.nn.functional.pad(gradient, [0, 0] * (gradient.ndim - 1 - dim) + [0, missing])
    return [shard.contiguous() for shard in padded.chunk(axis_size(axis), dim)]
