"""Ops of one operand that commute with a sum over ranks or microbatches: they move elements, or add zeros."""

from __future__ import annotations

import torch
from torch import fx

from ..ir import primitive_name

__all__ = ["REARRANGED", "commutes_with_sum"]

aten = torch.ops.aten

REARRANGED = {  # ops that only rearrange or select elements
    aten.view.default,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.alias.default,
}
_LINEAR = REARRANGED | {aten._unsafe_view.default, aten.slice_backward.default, aten.constant_pad_nd.default}


def commutes_with_sum(node: fx.Node) -> bool:
    """Whether an op commutes with a sum; casts of a value's type over an axis do."""
    return node.target in _LINEAR or primitive_name(node) == "pcast"
