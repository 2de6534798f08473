"""Elementwise ops: any op that torch tags pointwise has the nonlinear rule; here are the linear ones.

A sum with a Python number is not linear (each rank would add it), so a linear mark counts only between tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ... import collectives as fp
from ...collectives import MICROBATCH, hidden_axes
from ...ir import info, tensor_operands
from ...tracing import STRAIGHT_THROUGH
from ..axis_layout import PARTIAL, REPLICATED
from ..decide import OpSharding
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import linear_text, pattern, pointwise_text
from .batched import all_whole_text

aten = torch.ops.aten


def _sum_text(node: fx.Node) -> str:
    return linear_text("&&")(node) if len(tensor_operands(node)) == 2 else pointwise_text(node)


def _quotient_text(node: fx.Node) -> str:
    """Linear in the numerator, unless it is rounded."""
    rounded = node.kwargs.get("rounding_mode") is not None
    numerator_is_tensor = isinstance(node.args[0], fx.Node)
    return pointwise_text(node) if rounded or not numerator_is_tensor else linear_text("~.")(node)


def _cast_text(node: fx.Node) -> str:
    """Partial sums are completed before a cast: narrower they would round, and wider be more to send."""
    return "~... -> ..." if info(node.args[0]).aval.dtype == info(node).aval.dtype else "... -> ..."


def _decide_quotient(step: OpContext) -> OpSharding | None:
    """A quotient of two sums (a mean over what a mask keeps) completes both in one collective.

    Not with microbatches: the count must not wait for what the forward computes.
    """
    if MICROBATCH in (step.axis, *hidden_axes()):
        return None
    both = len(step.operands) == 2 and all(operand.place == PARTIAL for operand in step.operands)
    alike = both and step.operands[0].aval == step.operands[1].aval and not step.node.kwargs.get("rounding_mode")
    return OpSharding((PARTIAL, PARTIAL), (REPLICATED,)) if alike else None


def _local_quotient(step: OpContext, a: Any, b: Any, **kwargs: Any) -> Any:
    if step.decision.operands != (PARTIAL, PARTIAL):
        return step.run(a, b, **kwargs)
    a, b = fp.psum(torch.stack([a, b]), step.axis).unbind()
    return step.run(a, b, **kwargs)


def _with_buffer_text(node: fx.Node) -> str:
    """A result, and on some devices as much memory for the backward."""
    x, buffer = info(node.args[0]).aval.shape, info(node).result(1).shape
    return "... -> ..., ..." if x == buffer else all_whole_text(node)


def _membership_text(node: fx.Node) -> str:
    """`isin(elements, test_elements)`: each element is looked for among all of the others."""
    return f"..., {pattern(f't{dim}^' for dim in range(info(node.args[1]).aval.ndim))} -> ..."


rule([aten.add.Tensor, aten.sub.Tensor], Rule(_sum_text))
rule([aten.mul.Tensor], Rule(linear_text("~~")))
rule([aten.mul.Scalar, aten.neg.default, aten.clone.default, aten.detach.default], Rule("~... -> ..."))
rule([aten.contiguous.default, aten.alias.default, aten.lift_fresh.default], Rule("~... -> ..."))
rule([aten.div.Tensor, aten.div.Tensor_mode], Rule(_quotient_text, _local_quotient, _decide_quotient))
rule([aten.div.Scalar], Rule("~... -> ..."))
rule([aten._to_copy.default], Rule(_cast_text))
rule([aten.where.self], Rule("..., &..., &... -> ..."))
rule([aten.copy.default], Rule("..., ... -> ..."))
rule([aten.floor_divide.default], Rule(pointwise_text))  # which torch does not tag so
rule([aten.leaky_relu.default], Rule(pointwise_text))  # nor this one, in 2.11
rule([STRAIGHT_THROUGH], Rule("&..., &... -> ..."))
rule([aten.rsub.Tensor], Rule(_sum_text))
rule([aten._conj.default, aten._conj_physical.default], Rule("~... -> ..."))
rule([aten.complex.default], Rule("&..., &... -> ..."))
rule([aten.polar.default, aten._prelu_kernel.default, aten.hardswish.default], Rule(pointwise_text))
rule([aten.masked_fill.Tensor], Rule(pointwise_text))
rule([aten.log_sigmoid_forward.default], Rule(_with_buffer_text))
rule([aten.bucketize.Tensor], Rule("..., boundary^ -> ..."))
rule([aten.isin.Tensor_Tensor], Rule(_membership_text))
