"""Products of matrices go into the sums that they are added to, where nobody needs the sum so far any more.

A kernel that multiplies can add while it writes (BLAS's beta), so the addition costs nothing, and the product never
lies by itself. That is most of what a step adds up: gradients of weights over microbatches, and those of an input that
several products take. Megatron-LM has kernels of its own for the first (`gradient_accumulation_fusion`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from ...collectives.types import State
from ...products import adds_last, faster_kernel
from ...tracing import Traced
from ..variation import Axes, axes_of_nodes

__all__ = ["add_products_in_place"]

aten = torch.ops.aten


def add_products_in_place(traced: Traced) -> bool:
    """Let products write into sums: those that are written into already, and those of products; whether any does.

    A sum is written where its last product is made, so operands live no longer for it. Left as they are: products by a
    kernel that cannot add, or would round otherwise.
    """
    position = {node: index for index, node in enumerate(traced.graph.nodes)}
    sums = [node for node in traced.nodes if node.target in (aten.add.Tensor, aten.add_.Tensor)]
    axes: dict[fx.Node, Axes] = {}
    found = False
    for node in sums:
        total, product = _parts(node, position)
        if product is None:
            continue
        axes = axes or axes_of_nodes(traced, {node: _axes_of_input(node) for node in traced.inputs})
        if not (node.target is aten.add_.Tensor or _is_given_up(total, node, axes)):
            continue
        with traced.graph.inserting_before(product):
            into = traced.graph.call_function(aten.addmm_.default, (total, *product.args))
        into.meta = dict(node.meta)
        position[into], axes[into] = position[product], axes[node]
        traced.replace(node, into)
        traced.graph.erase_node(product)
        found = True
    return found


def _axes_of_input(node: fx.Node) -> Axes:
    return frozenset(axis for axis, state in node.meta.get("type", {}).items() if state is not State.INVARIANT)


def _parts(node: fx.Node, position: Mapping[fx.Node, int]) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    """Of a sum of two the one that is there first, and a product that it alone takes."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None, None
    total, product = sorted(node.args, key=position.__getitem__)  # type: ignore[arg-type]
    fits = total.meta["val"] == product.meta["val"] == node.meta["val"]
    is_product = product.target is aten.mm.default and list(product.users) == [node] and total is not product
    fits = fits and 1 not in product.meta["val"].shape  # a kernel for vectors adds term by term, and rounds otherwise
    adds = fits and is_product and faster_kernel(product) is None and adds_last(product.meta["val"])
    return (total, product) if adds else (None, None)


def _is_given_up(total: fx.Node, node: fx.Node, axes: Mapping[fx.Node, Axes]) -> bool:
    """Whether a value lies by itself, for this sum alone, on every rank that has a sum of its own."""
    is_own = total.target in (aten.mm.default, aten.addmm_.default)
    return is_own and list(total.users) == [node] and axes[total] == axes[node]
