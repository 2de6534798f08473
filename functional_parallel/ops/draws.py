"""Sharding rule of keyed draws: a shard gets the numbers of the full tensor at its positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from .. import random
from ..rules import REPLICATED, OpContext, OpSharding, Rule, Shard, rule


def _decide(step: OpContext) -> OpSharding:
    """Return the layout of `like`, or of the keys if `like` is not sharded."""
    # Only the shape of `like` is read, so partial sums count as replicated.
    like, key = (operand.place for operand in step.operands)
    if isinstance(like, Shard):
        return OpSharding((like, REPLICATED), (replace(like, dim=like.dim + _keys(step)),), of_shapes=True)
    return OpSharding((like, key), (key if isinstance(key, Shard) else REPLICATED,), of_shapes=True)


def _keys(step: OpContext) -> int:
    """Number of leading dims for keys."""
    return step.operands[1].aval.ndim


def _local(
    step: OpContext,
    like: torch.Tensor,
    key: torch.Tensor,
    shape: Sequence[int],
    axes: Sequence[str],
    splits: Sequence[int],
) -> torch.Tensor:
    place = step.decision.operands[0]
    if isinstance(place, Shard):
        axes, splits = [*axes, step.axis], [*splits, place.dim, place.outer, step.parts.samples]
    return step.run(like, key, shape, axes, splits)


rule([random.OP], Rule(decide=_decide, local=_local))
