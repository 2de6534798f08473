"""Decompose backward ops in a loss that takes derivatives itself into ops that have rules.

A trace records torch's derivatives, which are one fused op each. Torch also has formulas for them in simpler ops. The
derivatives of a formula are correct only if all values that the forward saved have derivatives. This holds for the
result of a softmax, but not for the statistics of a norm.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import fx

from .. import _torch
from ..ir import Aval, Traced, info, tensor_operands, update_info, walk_args
from ..rules import OpContext, Shard, batch_norm_formula
from ..tracing import trace
from .preparation import prepare

aten = torch.ops.aten

_OPS = {  # ops that run unchanged on shards have rules in rules.aten.gradients instead
    getattr(aten, name).default
    for name in (
        *("_log_softmax_backward_data", "_softmax_backward_data", "nll_loss_backward", "nll_loss2d_backward"),
        *("binary_cross_entropy_backward", "huber_loss_backward", "mse_loss_backward", "smooth_l1_loss_backward"),
        *("soft_margin_loss_backward", "glu_backward", "diagonal_backward", "select_backward", "slice_backward"),
    )
}

_FORMULAS = {aten.native_batch_norm.default: batch_norm_formula}


def crosses_ranks(step: OpContext) -> bool:
    """Whether a batch norm has statistics of the shards of several ranks. Its rule is for the channels, or one rank."""
    place = step.operands[0].place
    by_channel = isinstance(place, Shard) and place.dim == 1
    return step.node.target in _FORMULAS and step.parts.ranks > 1 and not by_channel


def decomposed(node: fx.Node) -> Traced | None:
    """Return a graph from the tensor operands of a backward op to its results, or None if it has no decomposition."""
    formula = _FORMULAS.get(node.target) or (_torch.decomposition_of(node.target) if node.target in _OPS else None)
    if formula is None:
        return None
    avals: list[Aval] = [info(operand).aval for operand in tensor_operands(node)]

    def flat(*values: torch.Tensor) -> list[Any]:
        rest = iter(values)
        args, named = walk_args(
            (node.args, node.kwargs), lambda leaf: next(rest) if isinstance(leaf, fx.Node) else leaf
        )
        return list(optree.tree_leaves(formula(*args, **named), none_is_leaf=True))

    traced = prepare(trace(flat, avals))
    for inner in traced.nodes:
        update_info(inner, source=info(node).source, backward=info(node).backward, no_grad=info(node).no_grad)
    return traced
