"""Rewrite a traced forward so that it needs fewer rules and fewer collectives.

Biases are split from fused products, because each rank would add one if the contraction is sharded. Cross entropy is
recorded as one op, so that its classes can stay sharded. Cross entropy of images, or of a sequence with its classes in
the middle, is rewritten to cross entropy of rows.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..ir import RESHAPES, Args, Aval, Traced, info, simplify, update_info
from ..rules import cross_entropy
from ..tracing import assume_constants, constant_in

aten = torch.ops.aten


_PRODUCTS = {
    aten.addmm.default: aten.mm.default,
    aten.addmv.default: aten.mv.default,
    aten.baddbmm.default: aten.bmm.default,
}
_INDEXING = (aten.index.Tensor, aten.index_put.default)


def prepare(traced: Traced) -> Traced:
    """Split biases off, record cross entropy as one op, and merge equal nodes."""
    for node in list(traced.nodes):
        if node.target in _PRODUCTS:
            _split_product(traced, node)
        elif node.target is aten.convolution.default and node.args[2] is not None:
            _split_convolution(traced, node)
        elif node.target is aten.nll_loss2d_forward.default:
            _likelihood_of_rows(traced, node)
        elif node.target is aten.cat.default:
            _drop_empty(node)
    simplify(traced)
    _fuse_cross_entropy(traced)
    _note_enumerated(traced)
    traced.seal()
    return traced


def _split_product(traced: Traced, node: fx.Node) -> None:
    """Rewrite `addmm(bias, a, b)` to `mm(a, b) * alpha + bias * beta`."""
    bias, a, b = node.args
    with traced.graph.inserting_before(node):
        product = _call(traced, node, _PRODUCTS[node.target], (a, b))
        product = _scaled(traced, node, product, node.kwargs.get("alpha", 1))
        total = _call(traced, node, aten.add.Tensor, (product, _scaled(traced, node, bias, node.kwargs.get("beta", 1))))
    traced.replace(node, total)


def _split_convolution(traced: Traced, node: fx.Node) -> None:
    """Rewrite `convolution(x, w, bias, …)` to `convolution(x, w, None, …) + bias` over the channels."""
    x, weight, bias, *rest = node.args
    aval = info(node).aval
    with traced.graph.inserting_before(node):
        product = _call(traced, node, aten.convolution.default, (x, weight, None, *rest))
        column = _viewed(traced, node, bias, tuple(size if dim == 1 else 1 for dim, size in enumerate(aval.shape)))
        total = _call(traced, node, aten.add.Tensor, (product, column))
    traced.replace(node, total)


def _likelihood_of_rows(traced: Traced, node: fx.Node) -> None:
    """Rewrite `nll_loss2d(z, …)`, and a softmax before it, to `nll_loss` with one row of classes per pixel."""
    scores, target, *rest = node.args
    pixels = info(target).aval.shape
    if scores.target in RESHAPES and info(scores.args[0]).aval.shape[:2] == info(scores).aval.shape[:2]:
        scores = scores.args[0]  # the user's tensor, with any number of dims
    with traced.graph.inserting_before(node):
        if scores.target is aten._log_softmax.default and scores.args[1] == 1:
            rows = _rows(traced, node, scores.args[0])
            aval = replace(info(scores).aval, shape=info(rows).aval.shape)
            rows = _call(traced, node, aten._log_softmax.default, (rows, 1, scores.args[2]), aval)
        else:
            rows = _rows(traced, node, scores)
        flat = _viewed(traced, node, target, (math.prod(pixels),))
        losses = _call(traced, node, aten.nll_loss_forward.default, (rows, flat, *rest))
        loss, total = info(node).avals
        if loss.ndim:
            update_info(losses, val=(Aval((math.prod(pixels),), loss.dtype, loss.device), total))
    for user in list(node.users):
        user.replace_input_with(node, losses)
        if user.target is operator.getitem and user.args[1] == 0 and loss.ndim:
            with traced.graph.inserting_after(user):
                whole = _viewed(traced, user, user, pixels)
            update_info(user, val=info(losses).result(0))
            traced.redirect(user, whole)


def _rows(traced: Traced, like: fx.Node, x: fx.Node) -> fx.Node:
    """Reshape `(n, c, …)` to `(n · …, c)`."""
    aval = info(x).aval
    order = [0, *range(2, aval.ndim), 1]
    turned = replace(aval, shape=tuple(aval.shape[dim] for dim in order))
    last = _call(traced, like, aten.permute.default, (x, order), turned)
    return _viewed(traced, like, last, (math.prod(turned.shape[:-1]), turned.shape[-1]))


def _viewed(traced: Traced, like: fx.Node, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    return _call(traced, like, aten.view.default, (x, list(shape)), replace(info(x).aval, shape=shape))


def _drop_empty(node: fx.Node) -> None:
    """Remove operands of shape (0,) from `cat`, which ignores them regardless of the dims of the others."""
    parts = [part for part in node.args[0] if info(part).aval.shape != (0,)]
    if parts and len(parts) < len(node.args[0]):
        node.args = (parts, *node.args[1:])


def _scaled(traced: Traced, node: fx.Node, value: fx.Node, factor: fx.node.Argument) -> fx.Node:
    if not info(value).aval.dtype.is_floating_point and not info(value).aval.dtype.is_complex:
        factor = int(factor)  # like torch's kernels of products
    return value if factor == 1 else _call(traced, node, aten.mul.Tensor, (value, factor), info(value).aval)


def _call(traced: Traced, like: fx.Node, op: fx.node.Target, args: Args, aval: Aval | None = None) -> fx.Node:
    return traced.call(op, args, info(like) if aval is None else info(like)._replace(val=aval))


def _fuse_cross_entropy(traced: Traced) -> None:
    """Replace each `nll_loss(log_softmax(z))` of a graph by one `cross_entropy(z)`."""
    for node in traced.nodes:
        if node.target is not aten.nll_loss_forward.default:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.target is not aten._log_softmax.default or source.args[2]:
            continue
        if source.args[1] in (-1, info(source).aval.ndim - 1):
            node.target = cross_entropy
            node.args = (source.args[0], *node.args[1:])


def _note_enumerated(traced: Traced) -> None:
    """Store in the info of every indexing op the dims that its indices enumerate.

    `x[torch.arange(len(x)), labels]` takes one element of every row. The rule of indexing lets such a dim stay sharded.
    Each rank then enumerates the rows of its shard from 0.
    """
    known: dict[fx.Node, Any] = {}
    for node in traced.nodes:
        if node.target in _INDEXING:
            found = tuple(_enumerated(traced, node, known).items())
            if found:
                update_info(node, enumerated=found)


def _enumerated(traced: Traced, node: fx.Node, known: dict[fx.Node, Any]) -> dict[int, int]:
    """Map each dim of x that an index enumerates to the dim of the broadcast indices where it does so."""
    x = info(node.args[0]).aval.shape
    indices = {dim: index for dim, index in enumerate(node.args[1]) if index is not None}
    avals = {dim: info(index).aval for dim, index in indices.items()}
    if any(aval.dtype == torch.bool for aval in avals.values()):
        return {}
    ndim = max(len(aval.shape) for aval in avals.values())
    found: dict[int, int] = {}
    for dim, index in indices.items():
        shape = avals[dim].shape
        along = [k for k, size in enumerate(shape, ndim - len(shape)) if size == x[dim]]
        value = constant_in(traced, index, known) if along else None
        if value is None:
            continue
        for k in along:
            column = torch.arange(x[dim], device="cpu").reshape([-1 if each == k else 1 for each in range(ndim)])
            if k not in found.values() and bool((value == column).all()):
                found[dim] = k
                assume_constants(traced, index)
                break
    return found
