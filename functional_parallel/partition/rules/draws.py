"""Keyed draws: the numbers of the whole tensor, wherever it is split."""

from __future__ import annotations

from typing import Any

import torch

from ... import random
from ..decide import Decision
from ..placement import WHOLE, Shard
from ..step import Step
from .registry import Rule, rule


def _decide(step: Step) -> Decision:
    """As `like` lies; only its shape is asked for, so partial sums count as whole."""
    place = step.operands[0].place
    result = place if isinstance(place, Shard) else WHOLE
    return Decision((place, WHOLE), (result,))


def _local(
    step: Step, like: torch.Tensor, key: torch.Tensor, shape: Any, axes: Any, dims: Any, outers: Any, samples: Any
) -> torch.Tensor:
    place = step.result_place()
    if isinstance(place, Shard):
        axes, dims, outers = [*axes, step.axis], [*dims, place.dim], [*outers, place.outer]
        samples = [*samples, step.parts.samples]
    return step.emit(random.OP, (like, key, shape, axes, dims, outers, samples), {})


rule([random.OP], Rule(decide=_decide, local=_local))
