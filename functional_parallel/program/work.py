"""How much work an op is, from shapes alone: enough to cut a model into equal parts."""

from __future__ import annotations

import math

import torch
from torch import fx

from sharding_specs import Mesh

from ..tracing import Aval
from ..tracing.graph import operands_of

__all__ = ["flops", "work"]

aten = torch.ops.aten

_BATCHED = {aten.bmm.default, aten.baddbmm.default}
_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.convolution.default, *_BATCHED}
_FLOPS_PER_BYTE = 4  # what a core computes while a pointwise op moves a byte


def flops(node: fx.Node) -> float:
    """Floating-point operations of a product of matrices, 0 for other ops.

    Of an m×k and a k×n matrix these are 2 √(mk · kn · mn): the sizes of operands and result say it without their dims.
    """
    if node.target not in _PRODUCTS:
        return 0.0
    sizes = [operand.meta["val"] for operand in operands_of(node)[-2:]]
    if node.target is aten.convolution.default:
        sizes = [operand.meta["val"] for operand in operands_of(node)[:2]]
    batch = node.meta["val"].shape[0] if node.target in _BATCHED else 1
    numbers = [*(aval.numel for aval in sizes), node.meta["val"].numel]
    return 2 * math.sqrt(math.prod(numbers) / max(batch, 1))


def work(node: fx.Node, mesh: Mesh) -> float:
    """Operations of an op, what it moves counted as those that would take as long."""
    value = node.meta["val"]
    results = value if isinstance(value, tuple) else (value,)
    moved = sum(aval.nbytes for aval in results if isinstance(aval, Aval))
    return flops(node) + _FLOPS_PER_BYTE * moved
