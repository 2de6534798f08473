"""Fuse matrix products into the sums that they are added to, if no other op reads the old sum.

A matrix product can add to its output (BLAS's beta), so the addition is free and the product needs no memory. Most
sums of a training step have this form: gradients of weights over microbatches, and the gradient of an input that
several products read. Megatron-LM has kernels for the first (`gradient_accumulation_fusion`).

In float32 and float64 on the CPU products and sums stay separate. Some processors' kernels add before they multiply,
which rounds differently. Then the bits of a microbatch's gradient would depend on the schedule, and a program that
tests for this would depend on the machine. Narrower dtypes are fused: one rounding fewer is worth more there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..collectives import State
from ..ir import Aval, AxisSet, Traced, axes_of_nodes, in_main_memory, info
from .program_pass import Phase, ProgramPass, Scope, Settings

aten = torch.ops.aten


@dataclass(frozen=True)
class AddedProducts(ProgramPass):
    """Write matrix products into the sums that they are added to."""

    name: ClassVar[str] = "in place"
    phase: ClassVar[Phase] = Phase.IN_PLACE
    scope: ClassVar[Scope] = Scope.STAGE

    @classmethod
    def implied(cls, settings: Settings) -> Iterable[ProgramPass]:
        return [cls()] if settings.options.donate or settings.pipelined is not None else []

    def run(self, traced: Traced, mesh: Mesh) -> None:
        fuse_matmul_accumulate(traced)


def fuse_matmul_accumulate(traced: Traced) -> bool:
    """Write products into sums that are updated in place or are sums of products; return whether any was.

    A sum is written at its last product, so no operand lives longer for it.
    """
    position = {node: index for index, node in enumerate(traced.graph.nodes)}
    sums = [node for node in traced.nodes if node.target in (aten.add.Tensor, aten.add_.Tensor)]
    axes: dict[fx.Node, AxisSet] = {}
    found = False
    for node in sums:
        total, product = _parts(node, position)
        if product is None:
            continue
        axes = axes or axes_of_nodes(traced, {node: _axes_of_input(node) for node in traced.inputs})
        if not (node.target is aten.add_.Tensor or _is_given_up(total, node, axes)):
            continue
        with traced.graph.inserting_before(product):
            into = traced.call(aten.addmm_.default, (total, *product.args), info(node))
        position[into], axes[into] = position[product], axes[node]
        traced.replace(node, into)
        traced.graph.erase_node(product)
        found = True
    return found


def _axes_of_input(node: fx.Node) -> AxisSet:
    return frozenset(axis for axis, state in (info(node).type or {}).items() if state is not State.INVARIANT)


def _parts(node: fx.Node, position: Mapping[fx.Node, int]) -> tuple[fx.Node, fx.Node] | tuple[None, None]:
    """Return the earlier operand of a sum of two, and the later one if it is a product that only the sum reads."""
    if len(node.args) != 2 or node.kwargs or not all(isinstance(arg, fx.Node) for arg in node.args):
        return None, None
    total, product = sorted(node.args, key=position.__getitem__)
    fits = info(total).val == info(product).val == info(node).val
    is_product = product.target is aten.mm.default and list(product.users) == [node] and total is not product
    fits = fits and 1 not in info(product).aval.shape  # a kernel for vectors adds term by term and rounds differently
    return (total, product) if fits and is_product and fuses(info(product).aval) else (None, None)


def fuses(like: Aval) -> bool:
    """Whether a product with this device and dtype is written into its sum. The answer is equal on all machines."""
    return not in_main_memory(like) or like.dtype not in (torch.float32, torch.float64)


def _is_given_up(total: fx.Node, node: fx.Node, axes: Mapping[fx.Node, AxisSet]) -> bool:
    """Whether a product or sum of products is read by this sum only, and varies over the same axes as the sum."""
    is_own = total.target in (aten.mm.default, aten.addmm_.default)
    return is_own and list(total.users) == [node] and axes[total] == axes[node]
