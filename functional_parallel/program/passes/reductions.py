"""Gradients are reduced as soon as they are ready, not when something asks for the sum.

That frees a gradient that is scattered, and lets a runtime with asynchronous collectives reduce the gradients of the
last layers while the backward goes on to the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from sharding_specs import Mesh

from ...tracing import Traced
from ...tracing.graph import primitive_name
from .base import ProgramPass

__all__ = ["Reductions"]


@dataclass(frozen=True)
class Reductions(ProgramPass):
    """Move every sum of a gradient to where the gradient is computed."""

    name: str = "reductions"
    order: int = 2

    def run(self, traced: Traced, mesh: Mesh) -> None:
        for node in list(traced.nodes):
            if primitive_name(node) not in ("psum", "psum_scatter"):
                continue
            operand = node.args[0]
            if not operand.meta["backward"] or operand.op != "call_function":
                continue
            while primitive_name(operand) == "pcast" and operand.args[0].op == "call_function":
                operand = operand.args[0]
            chain = [node]
            while chain[0].args[0] is not operand:
                chain.insert(0, chain[0].args[0])
            for each in reversed(chain):
                operand.append(each)
