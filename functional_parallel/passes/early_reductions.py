"""Reduce gradients as soon as they are ready, not when an op reads the sum.

That frees a gradient that is scattered. A runtime with asynchronous collectives can reduce the gradients of the last
layers while the backward continues with the first layers. After a pipeline, all gradients are ready and are sent first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Role, Traced, collective_call, info, operands_of
from ..ops import TO_MEMORY
from .program_pass import Phase, ProgramPass, Scope
from .swap import commutes_with_sum, is_cast

aten = torch.ops.aten


@dataclass(frozen=True)
class EarlyReductions(ProgramPass):
    """Move every sum of a gradient to the position where the gradient is computed."""

    name: ClassVar[str] = "reductions"
    phase: ClassVar[Phase] = Phase.SUMS
    scope: ClassVar[Scope] = Scope.STAGE
    is_implied: ClassVar[bool] = True

    def run(self, traced: Traced, mesh: Mesh) -> None:
        first = list(traced.inputs)  # followed by the sums of inputs that are gradients
        for node in list(traced.nodes):
            call = collective_call(node, "psum", "psum_scatter", "reduce")
            if call is None or not (info(call.operand).backward or info(node).role is Role.GRADIENT):
                continue
            gradient, chain = _moved_on_the_way(node)
            if gradient.op == "get_attr":
                continue
            for each in chain:
                ready = max(operands_of(each))
                (first[-1] if ready.op == "placeholder" else ready).append(each)
            if gradient.op == "placeholder":
                first.append(node)


def _moved_on_the_way(total: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Return the last gradient that is summed, and the ops from it to its sum: casts, views, moves and additions."""
    chain = [total]
    while _only_moves(gradient := max(operands_of(chain[0]))):
        chain.insert(0, gradient)
    return gradient, chain


def _only_moves(node: fx.Node) -> bool:
    return commutes_with_sum(node) or is_cast(node) or node.target in (aten.add.Tensor, TO_MEMORY)
