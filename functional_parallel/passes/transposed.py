"""Compute gradients of weights in the orientation of their use.

The gradient of `x @ w.T` is traced as `(x.T @ dy).T`, a product followed by a transposed view. An op that reads it in
order, such as a bucket or an optimizer, would access memory with a stride. `dy.T @ x` is the same value, contiguous;
eager autograd chooses it too, by the strides of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from sharding_specs import Mesh

from ..ir import Traced, collective_call, first_operand, info, operands_of, primitive_name, update_info
from .program_pass import Phase, ProgramPass

aten = torch.ops.aten


@dataclass(frozen=True)
class TransposedGradients(ProgramPass):
    """Compute `(a @ b).T` as `b.T @ a.T`, also with casts, sums and collectives between product and transpose."""

    name: ClassVar[str] = "turned"
    phase: ClassVar[Phase] = Phase.GATHERS
    is_implied: ClassVar[bool] = True

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for node in list(traced.nodes):
            if not (_turns(node) and info(node).backward):
                continue
            source = node.args[0]
            if source.op == "call_function" and _turns(source):
                traced.replace(node, by=source.args[0])
            elif any(not _turns(user) for user in node.users) and _can_turn(source, traced.outputs):
                _turn(traced, source)
                traced.replace(node, by=source)


def _turns(node: fx.Node) -> bool:
    if node.target is aten.t.default:
        return len(info(node).aval.shape) == 2
    if node.target is aten.permute.default:
        return [dim % 2 for dim in node.args[1]] == [1, 0] and len(node.args[1]) == 2
    is_matrix = node.target is aten.transpose.int and len(info(node).aval.shape) == 2
    return is_matrix and node.args[1] % 2 != node.args[2] % 2


def _can_turn(node: fx.Node, outputs: list[object]) -> bool:
    """Whether a value has a single user, and its op can compute the transpose just as well.

    A recomputed value keeps the orientation, and so the bits, of the forward.
    """
    if node.op != "call_function" or len(node.users) != 1 or node in outputs or info(node).recomputed:
        return False
    if node.target is aten.mm.default:
        return True
    if node.target is aten.add.Tensor:
        return all(
            isinstance(each, fx.Node)
            and info(each).aval.shape == info(node).aval.shape
            and each not in node.args[:index]
            and _can_turn(each, outputs)
            for index, each in enumerate(node.args)
        )
    is_through = primitive_name(node) in ("pcast", "psum", "psum_scatter") or node.target is aten._to_copy.default
    return is_through and _can_turn(first_operand(node), outputs)


def _turn(traced: Traced, node: fx.Node) -> None:
    update_info(node, val=replace(info(node).aval, shape=info(node).aval.shape[::-1]))
    if node.target is aten.mm.default:
        with traced.graph.inserting_before(node):
            a, b = (_turned(traced, each) for each in node.args)
        node.args = (b, a)
        return
    for each in operands_of(node):
        _turn(traced, each)
    if call := collective_call(node):
        node.args = call.with_dims(lambda dim: 1 - dim).args


def _turned(traced: Traced, node: fx.Node) -> fx.Node:
    if node.op == "call_function" and _turns(node):
        return node.args[0]
    aval = replace(info(node).aval, shape=info(node).aval.shape[::-1])
    return traced.call(aten.t.default, (node,), info(node)._replace(val=aval, backward=True))
