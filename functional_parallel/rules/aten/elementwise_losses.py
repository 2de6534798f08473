"""Rules of elementwise losses with a sum or a mean. The sum over a sharded dim stays partial."""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.fx.node import Argument

from ...ir import argument, info, tensor_operands
from ..axis_layout import Shard
from ..duplicates import mask_duplicates
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import dim_names, pattern

aten = torch.ops.aten

_NONE, _MEAN = 0, 1  # torch's codes for reduction=

_LOSSES = {  # position of the argument `reduction` of the op
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default), 2),
    **dict.fromkeys((aten.huber_loss.default, aten.soft_margin_loss.default), 2),
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}


def _shape(node: fx.Node) -> tuple[int, ...]:
    """Shape of the losses of all elements."""
    return tuple(torch.broadcast_shapes(*(info(operand).aval.shape for operand in tensor_operands(node))))


def _text(node: fx.Node) -> str:
    whole = _shape(node)
    mark = "" if argument(node, "reduction") == _NONE else "+"
    operands = []
    for operand in tensor_operands(node):
        shape = info(operand).aval.shape
        ahead = len(whole) - len(shape)
        named = (f"d{ahead + i}{mark}" if size == whole[ahead + i] else "1" for i, size in enumerate(shape))
        operands.append(pattern(named))
    return f"{', '.join(operands)} -> {pattern(() if mark else dim_names(len(whole)))}"


def _local(step: OpContext, *args: Argument, **kwargs: Argument) -> torch.Tensor:
    """Compute the losses of a rank's elements. A mean divides their sum by the global count."""
    position, reduction = _LOSSES[step.node.target], argument(step.node, "reduction")
    if reduction == _NONE or step.choice is None:
        return step.run(*args, **kwargs)
    if position < len(args):
        args = (*args[:position], _NONE, *args[position + 1 :])
    else:
        kwargs = {**kwargs, "reduction": _NONE}
    place = Shard(int(step.choice.factor[1:]), step.choice.outer)
    total = mask_duplicates(step.run(*args, **kwargs), place, step.axis, step.parts).sum()
    return total / math.prod(_shape(step.node)) if reduction == _MEAN else total


rule(_LOSSES, Rule(_text, _local, counts=True))
