"""Compute a batched product of one row each with the same matrix as one product.

A projection of a single token is traced as `x.bmm(w.expand(batch, …))`, because the activation of an attention has
strides that torch does not fold. A kernel would read the matrix once for each member of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, info
from .program_pass import Phase, ProgramPass, Scope

aten = torch.ops.aten


@dataclass(frozen=True)
class FoldedProducts(ProgramPass):
    """Compute `x.bmm(w.expand(batch, …))`, with one row for each member of the batch, as one product."""

    name: ClassVar[str] = "folded"
    phase: ClassVar[Phase] = Phase.IN_PLACE
    scope: ClassVar[Scope] = Scope.STAGE
    is_implied: ClassVar[bool] = True

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for node in list(traced.nodes):
            if node.target is aten.bmm.default and _is_same_matrix(node.args[1]) and info(node).aval.shape[1] == 1:
                _fold(traced, node)


def _is_same_matrix(node: fx.Node) -> bool:
    return node.target is aten.expand.default and len(info(node.args[0]).aval.shape) == 2


def _fold(traced: Traced, node: fx.Node) -> None:
    (x, expanded), known = node.args, info(node)
    (rows, _, columns), inner = known.aval.shape, info(x).aval.shape[2]
    with traced.graph.inserting_before(node):
        given = known._replace(val=replace(info(x).aval, shape=(rows, inner)), type=info(x).type)
        flat = traced.call(aten.view.default, (x, [rows, inner]), given)
        product = known._replace(val=replace(known.aval, shape=(rows, columns)))
        made = traced.call(aten.mm.default, (flat, expanded.args[0]), product)
    node.target, node.args = aten.view.default, (made, [rows, 1, columns])
    if not expanded.users:
        traced.graph.erase_node(expanded)
