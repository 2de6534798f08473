"""Losses of each element by itself, then a sum or a mean: over a sharded dim the sum stays partial."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ..duplicates import once
from ..placement import Shard
from ..step import Step
from .broadcast import tensor_operands
from .registry import Rule, rule

aten = torch.ops.aten

_NONE, _MEAN = 0, 1  # torch's codes for reduction=

_REDUCTION = {  # at which place the op takes it
    aten.mse_loss.default: 2,
    aten.smooth_l1_loss.default: 2,
    aten.huber_loss.default: 2,
    aten.soft_margin_loss.default: 2,
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}


def _arguments(node: fx.Node) -> tuple[list[Any], int]:
    """The op's arguments, those left out too, and its reduction."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = [*node.args, *(node.kwargs.get(each.name, each.default_value) for each in schema[len(node.args) :])]
    return given, given[_REDUCTION[node.target]]


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Of the losses of all elements."""
    return tuple(torch.broadcast_shapes(*(operand.meta["val"].shape for operand in tensor_operands(node))))


def _text(node: fx.Node) -> str:
    whole = _shape(node)
    mark = "" if _arguments(node)[1] == _NONE else "+"
    operands = []
    for operand in tensor_operands(node):
        shape = operand.meta["val"].shape
        ahead = len(whole) - len(shape)
        named = (f"d{ahead + i}{mark}" if size == whole[ahead + i] else "1" for i, size in enumerate(shape))
        operands.append(" ".join(named) or "()")
    result = "" if mark else " ".join(f"d{dim}" for dim in range(len(whole)))
    return f"{', '.join(operands)} -> {result or '()'}"


def _local(step: Step, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The losses of a rank's elements; summed, they are divided by the whole count."""
    position, reduction = _REDUCTION[step.node.target], _arguments(step.node)[1]
    if reduction == _NONE or step.choice is None:
        return step.run(*args, **kwargs)
    named = step.node.target._schema.arguments[position].name  # type: ignore[union-attr]
    if position < len(args):
        args = (*args[:position], _NONE, *args[position + 1 :])
    else:
        kwargs = {**kwargs, named: _NONE}
    place = Shard(int(step.choice.factor[1:]), step.choice.outer)
    total = once(step.run(*args, **kwargs), place, step.axis, step.parts).sum()
    return total / math.prod(_shape(step.node)) if reduction == _MEAN else total


rule(_REDUCTION, Rule(_text, _local, counts=True))
