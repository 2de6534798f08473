"""Ops of one operand that commute with a sum over ranks or microbatches: they move elements, or add zeros."""

from __future__ import annotations

import torch
from torch import fx

from ..ir import primitive_name

__all__ = ["commutes_with_sum"]

aten = torch.ops.aten

_LINEAR = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.slice.Tensor,
    aten.slice_backward.default,
    aten.constant_pad_nd.default,
    aten.alias.default,
}


def commutes_with_sum(node: fx.Node) -> bool:
    """Whether an op is in this set; casts of a value's type over an axis are."""
    return node.target in _LINEAR or primitive_name(node) == "pcast"
