"""Rules of linear elementwise ops. Any other op that torch tags pointwise has the nonlinear rule."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ...collectives import MICROBATCH, hidden_axes
from ...ir import info, tensor_operands
from ...tracing import STRAIGHT_THROUGH
from ..axis_layout import PARTIAL, REPLICATED
from ..convert import on_one_rank
from ..decide import OpSharding
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import all_whole_text, linear_text, pattern, pointwise_text

aten = torch.ops.aten


def _sum_text(node: fx.Node) -> str:
    if len(tensor_operands(node)) == 2:
        return linear_text("&&")(node)
    (x,) = tensor_operands(node)
    adds_zero = node.args[1] == 0 and info(x).aval.dtype == info(node).aval.dtype
    return "~... -> ..." if adds_zero else pointwise_text(node)


def _decide_sum(step: OpContext) -> OpSharding | None:
    """Keep partial sums that only this op reads, when it adds a number."""
    x = step.operands[0]
    keeps = isinstance(step.node.args[0], fx.Node) and len(step.operands) == 1 and x.aval == step.result()
    keeps = keeps and x.place == PARTIAL and x.is_read_once
    return OpSharding((PARTIAL,), (PARTIAL,)) if keeps else None


def _local_sum(step: OpContext, x: Tensor, other: Tensor | complex, *alpha: float, **kwargs: Argument) -> Tensor:
    if isinstance(other, Tensor) or other == 0 or step.decision.operands != (PARTIAL,):
        return step.run(x, other, *alpha, **kwargs)
    number = on_one_rank(torch.full((), other, dtype=x.dtype, device=x.device), step.axis)
    op, named = _WITH_TENSOR.get(step.node.target, step.node.target), {"alpha": alpha[0]} if alpha else kwargs
    result: Tensor = step.emit(op, (x, number), named)
    return result


_WITH_TENSOR = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.rsub.Scalar: aten.rsub.Tensor,
}


def _quotient_text(node: fx.Node) -> str:
    rounded = node.kwargs.get("rounding_mode") is not None
    numerator_is_tensor = isinstance(node.args[0], fx.Node)
    return pointwise_text(node) if rounded or not numerator_is_tensor else linear_text("~.")(node)


def _cast_text(node: fx.Node) -> str:
    """Rule of a cast. Partial sums are completed before it: narrower sums would round, wider sums need more bytes."""
    return "~... -> ..." if info(node.args[0]).aval.dtype == info(node).aval.dtype else "... -> ..."


def _decide_quotient(step: OpContext) -> OpSharding | None:
    # This is not done with microbatches, because the count must not wait for the forward.
    if MICROBATCH in (step.axis, *hidden_axes()):
        return None
    both = len(step.operands) == 2 and all(operand.place == PARTIAL for operand in step.operands)
    alike = both and step.operands[0].aval == step.operands[1].aval and not step.node.kwargs.get("rounding_mode")
    return OpSharding((PARTIAL, PARTIAL), (REPLICATED,)) if alike else None


def _local_quotient(step: OpContext, a: Tensor, b: Tensor, **kwargs: str | None) -> Tensor:
    if step.decision.operands != (PARTIAL, PARTIAL):
        return step.run(a, b, **kwargs)
    a, b = step.summed(torch.stack([a, b])).unbind()
    return step.run(a, b, **kwargs)


def _with_buffer_text(node: fx.Node) -> str:
    x, buffer = info(node.args[0]).aval.shape, info(node).result(1).shape
    return "... -> ..., ..." if x == buffer else all_whole_text(node)


def _membership_text(node: fx.Node) -> str:
    return f"..., {pattern(f't{dim}^' for dim in range(info(node.args[1]).aval.ndim))} -> ..."


rule([aten.add.Tensor, aten.sub.Tensor, aten.rsub.Tensor, *_WITH_TENSOR], Rule(_sum_text, _local_sum, _decide_sum))
rule([aten.mul.Tensor], Rule(linear_text("~~")))
rule([aten.mul.Scalar, aten.neg.default, aten.clone.default, aten.detach.default], Rule("~... -> ..."))
rule([aten.contiguous.default, aten.alias.default, aten.lift_fresh.default], Rule("~... -> ..."))
rule([aten.div.Tensor, aten.div.Tensor_mode], Rule(_quotient_text, _local_quotient, _decide_quotient))
rule([aten.div.Scalar], Rule("~... -> ..."))
rule([aten._to_copy.default], Rule(_cast_text))
rule([aten.where.self], Rule("..., &..., &... -> ..."))
rule([aten.copy.default], Rule("..., ... -> ..."))
rule([aten.floor_divide.default], Rule(pointwise_text))  # torch does not tag it pointwise
rule([aten.leaky_relu.default], Rule(pointwise_text))  # not tagged in 2.11
rule([STRAIGHT_THROUGH], Rule("&..., &... -> ..."))
rule([aten._conj.default, aten._conj_physical.default], Rule("~... -> ..."))
rule([aten.complex.default], Rule("&..., &... -> ..."))
rule([aten.polar.default, aten._prelu_kernel.default, aten.hardswish.default], Rule(pointwise_text))
rule([aten.masked_fill.Tensor], Rule(pointwise_text))
rule([aten.log_sigmoid_forward.default], Rule(_with_buffer_text))
rule([aten.bucketize.Tensor], Rule("..., boundary^ -> ..."))
rule([aten.isin.Tensor_Tensor], Rule(_membership_text))
