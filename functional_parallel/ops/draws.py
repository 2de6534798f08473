"""Keyed draws: the numbers of the whole tensor, wherever it is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .. import random
from ..rules import REPLICATED, OpContext, OpSharding, Rule, Shard, rule


def _decide(step: OpContext) -> OpSharding:
    """As `like` lies, or as its keys do; only its shape is asked for, so partial sums count as whole."""
    like, key = (operand.place for operand in step.operands)
    if isinstance(like, Shard):
        return OpSharding((like, REPLICATED), (replace(like, dim=like.dim + _keys(step)),), of_shapes=True)
    return OpSharding((like, key), (key if isinstance(key, Shard) else REPLICATED,), of_shapes=True)


def _keys(step: OpContext) -> int:
    """How many dims of keys there are in front."""
    return step.operands[1].aval.ndim


def _local(
    step: OpContext, like: torch.Tensor, key: torch.Tensor, shape: Any, axes: Any, dims: Any, outers: Any, samples: Any
) -> torch.Tensor:
    place = step.decision.operands[0]
    if isinstance(place, Shard):
        axes, dims, outers = [*axes, step.axis], [*dims, place.dim], [*outers, place.outer]
        samples = [*samples, step.parts.samples]
    return step.emit(random.OP, (like, key, shape, axes, dims, outers, samples), {})


rule([random.OP], Rule(decide=_decide, local=_local))
