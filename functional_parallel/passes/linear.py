"""Ops of one operand that commute with a sum over ranks or microbatches: they move elements, or add zeros."""

from __future__ import annotations

import torch
from torch import fx

from ..ir import REARRANGEMENTS, primitive_name

__all__ = ["REARRANGED", "commutes_with_sum"]

aten = torch.ops.aten

# `select` takes one layer of a stack, which the passes keep apart from the stack; `expand` would send more bytes
REARRANGED = REARRANGEMENTS | {aten.slice.Tensor, aten.alias.default}
_LINEAR = REARRANGED | {aten.slice_backward.default, aten.constant_pad_nd.default}


def commutes_with_sum(node: fx.Node) -> bool:
    """Whether an op commutes with a sum; casts of a value's type over an axis do."""
    return node.target in _LINEAR or primitive_name(node) == "pcast"
