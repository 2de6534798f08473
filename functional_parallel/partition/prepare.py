"""Rewrites of a traced forward that keep its rules few and its collectives few.

Biases leave the products they are fused with: under a sharded contraction each rank would add one. Cross entropy is
named as one op, so that its classes can stay sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..tracing import Aval, Traced, simplify
from .rules.losses import fuse_cross_entropy

__all__ = ["prepare"]

aten = torch.ops.aten

_PRODUCTS = {aten.addmm.default: aten.mm.default, aten.baddbmm.default: aten.bmm.default}


def prepare(traced: Traced) -> Traced:
    """Split biases off, name cross entropies, and merge equal nodes."""
    for node in list(traced.nodes):
        if node.target in _PRODUCTS:
            _split_product(traced, node)
        elif node.target is aten.convolution.default and node.args[2] is not None:
            _split_convolution(traced, node)
        elif node.target is aten.cat.default:
            _drop_empty(node)
    simplify(traced)
    fuse_cross_entropy(traced)
    traced.seal()
    return traced


def _split_product(traced: Traced, node: fx.Node) -> None:
    """`addmm(bias, a, b)` → `mm(a, b) * alpha + bias * beta`."""
    bias, a, b = node.args
    with traced.graph.inserting_before(node):
        product = _call(traced, node, _PRODUCTS[node.target], (a, b))
        product = _scaled(traced, node, product, node.kwargs.get("alpha", 1))
        total = _call(traced, node, aten.add.Tensor, (product, _scaled(traced, node, bias, node.kwargs.get("beta", 1))))
    traced.replace(node, total)


def _split_convolution(traced: Traced, node: fx.Node) -> None:
    """`convolution(x, w, bias, …)` → `convolution(x, w, None, …) + bias` over the channels."""
    x, weight, bias, *rest = node.args
    aval = node.meta["val"]
    with traced.graph.inserting_before(node):
        product = _call(traced, node, aten.convolution.default, (x, weight, None, *rest))
        shape = (-1 if dim == 1 else 1 for dim in range(aval.ndim))
        sizes = [aval.shape[1] if size == -1 else 1 for size in shape]
        column = _call(traced, node, aten.view.default, (bias, sizes), Aval(tuple(sizes), aval.dtype, aval.device))
        total = _call(traced, node, aten.add.Tensor, (product, column))
    traced.replace(node, total)


def _drop_empty(node: fx.Node) -> None:
    """`cat` skips tensors of shape (0,) whatever the others' dims are."""
    parts = [part for part in node.args[0] if part.meta["val"].shape != (0,)]
    if parts and len(parts) < len(node.args[0]):
        node.args = (parts, *node.args[1:])


def _scaled(traced: Traced, node: fx.Node, value: Any, factor: Any) -> Any:
    return value if factor == 1 else _call(traced, node, aten.mul.Tensor, (value, factor), value.meta["val"])


def _call(traced: Traced, like: fx.Node, op: Any, args: tuple[Any, ...], aval: Aval | None = None) -> fx.Node:
    created = traced.graph.call_function(op, args)
    created.meta.update(like.meta)
    if aval is not None:
        created.meta["val"] = aval
    return created
