"""Backward ops of a loss that takes derivatives itself, written in ops that have rules.

A trace shows what torch's own derivatives consist of, one fused op each. Torch also has them in terms of plain ones.
Their derivatives are those of the fused op only where all that the forward kept has derivatives itself, as a softmax's
result does and a norm's statistics do not.
"""

from __future__ import annotations

from typing import Any

import optree
import torch
from torch import fx

from .. import _torch
from ..ir import Aval, Traced, info, tensor_operands, update_info, walk_args
from ..tracing import trace
from .preparation import prepare

__all__ = ["decomposed"]


aten = torch.ops.aten

_OPS = {  # those that are as they are on parts have rules, in rules.aten.gradients
    getattr(aten, name).default
    for name in (
        *("_log_softmax_backward_data", "_softmax_backward_data", "nll_loss_backward", "nll_loss2d_backward"),
        *("binary_cross_entropy_backward", "huber_loss_backward", "mse_loss_backward", "smooth_l1_loss_backward"),
        *("soft_margin_loss_backward", "glu_backward", "diagonal_backward", "select_backward", "slice_backward"),
    )
}


def decomposed(node: fx.Node) -> Traced | None:
    """A backward op as a graph from its tensor operands to its results, each by itself; None if there is no such."""
    formula = _torch.decomposition_of(node.target) if node.target in _OPS else None
    if formula is None:
        return None
    avals: list[Aval] = [info(operand).aval for operand in tensor_operands(node)]

    def flat(*values: torch.Tensor) -> list[Any]:
        rest = iter(values)
        args, named = walk_args(
            (node.args, node.kwargs), lambda leaf: next(rest) if isinstance(leaf, fx.Node) else leaf
        )
        return optree.tree_leaves(formula(*args, **named), none_is_leaf=True)

    traced = prepare(trace(flat, avals))
    for inner in traced.nodes:
        update_info(inner, source=info(node).source, backward=info(node).backward, no_grad=info(node).no_grad)
    return traced
