"""Rules of softmax, cross entropy and elementwise losses. If the classes are sharded, no rank holds the full logits.

For tokens t and classes c the loss is log Σ_c exp z[t, c] − z[t, target]. Ranks reduce three tensors of one number per
token: the maximum, the sum of exponentials, and the target's logit. (Megatron-LM does the same; arXiv 1909.08053 §3.)
Counts, class weights and ignored targets are global, regardless of the sharding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ... import collectives as fp
from ...collectives import MICROBATCH, hidden_axes
from ...ir import argument, info, tensor_operands
from ..axis_layout import Shard
from ..duplicates import mask_duplicates, reduction_identity
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import dim_names, dim_of, ndim_of, pattern
from .reductions import logsumexp_over_ranks

aten = torch.ops.aten

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's codes for reduction=


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    """Compute `nll_loss(log_softmax(logits))` and the total weight. A traced graph contains it as one op."""
    logarithms = logits.log_softmax(-1)
    loss, total = aten.nll_loss_forward.default(logarithms, target, weight, reduction, ignore)
    return loss, total


# --- Softmax ---


def _softmax_text(node: fx.Node) -> str:
    names = pattern(dim_names(ndim_of(node), {dim_of(node): "classes"}))
    return f"{names} -> {names}"


def _local_softmax(step: OpContext, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if not step.splits("classes") or not x.numel():
        return step.run(x, dim, half_to_float)
    exps = (x - fp.pmax(x.detach().amax(dim, keepdim=True), step.axis)).exp()
    return exps / fp.pvary(fp.psum(step.once(exps).sum(dim, keepdim=True), step.axis), step.axis)


def _local_log_softmax(step: OpContext, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    if not step.splits("classes") or not x.numel():
        return step.run(x, dim, half_to_float)
    counted = step.once(x, reduction_identity(x.dtype))
    return x - fp.pvary(logsumexp_over_ranks(counted, [dim], True, step.axis), step.axis)


rule([aten._softmax.default], Rule(_softmax_text, _local_softmax, casts=True, counts=True))
rule([aten._log_softmax.default], Rule(_softmax_text, _local_log_softmax, casts=True, counts=True))


# --- Negative log likelihood and cross entropy ---


def _likelihood_text(node: fx.Node) -> str:
    # A summed loss stays partial. A mean is a quotient of two completed sums.
    batched = ndim_of(node) == 2
    weighted = isinstance(node.args[2], fx.Node)
    weight = ", w^" if weighted else ""
    if not batched:
        return f"c!, (){weight} -> (), ()"
    if node.args[3] == _MEAN:
        return f"n! c!, n!{weight} -> (), ()"
    if node.args[3] == _SUM:
        return f"n+ c!, n+{weight} -> (), ()"
    return f"n! c!, n!{weight} -> n, ()"


def _local_likelihood(
    step: OpContext, scores: Tensor, target: Tensor, weight: Tensor | None, *rest: int
) -> Tensor | tuple[Tensor, Tensor]:
    reduction, ignore = rest
    axis = step.axis
    if step.choice is None:
        return step.run(scores, target, weight, *rest)
    if step.splits("n") and weight is not None:
        weight = fp.pvary(weight, axis)
    losses = _token_losses(step, scores, target)
    kept = target != ignore
    if step.splits("n"):
        kept = kept & step.own(target.shape[0], target.device)
    counts = kept.to(losses.dtype)
    if weight is not None:
        counts = counts * aten.index.Tensor(weight, [torch.where(kept, target, 0)])
    losses = torch.where(kept, losses, torch.zeros((), dtype=losses.dtype, device=losses.device)) * counts
    if reduction not in (_MEAN, _SUM):
        return losses, torch.zeros((), dtype=losses.dtype, device=losses.device)
    total = counts.sum()
    if reduction == _SUM:
        return losses.sum(), total
    if not step.splits("n"):
        return losses.sum() / total, total
    if MICROBATCH in (axis, *hidden_axes()):  # the count must not wait for the forward
        total = step.summed(total)
        return step.summed(losses.sum()) / total, total
    loss, total = step.summed(torch.stack([losses.sum(), total])).unbind()  # both sums in one collective
    return loss / total, total


def _token_losses(step: OpContext, scores: Tensor, target: Tensor) -> Tensor:
    is_logits = step.node.target is cross_entropy
    if not step.splits("c"):
        scores = scores.log_softmax(-1) if is_logits else scores
        classes = scores.shape[-1]
        return -scores.gather(-1, target.clamp(0, classes - 1).unsqueeze(-1)).squeeze(-1)
    local, inside = step.held_positions(target)
    picked = scores.gather(-1, local.unsqueeze(-1)).squeeze(-1)
    picked = torch.where(inside, picked, torch.zeros((), dtype=scores.dtype, device=scores.device))
    score = fp.psum(picked, step.axis)
    counted = step.once(scores, reduction_identity(scores.dtype))
    return logsumexp_over_ranks(counted, [-1], False, step.axis) - score if is_logits else -score


_LIKELIHOOD = Rule(_likelihood_text, _local_likelihood, casts=True, counts=True)
rule([aten.nll_loss_forward.default, cross_entropy], _LIKELIHOOD)


# --- Elementwise losses with a sum or a mean: the sum over a sharded dim stays partial ---

_ELEMENTWISE = {  # position of the argument `reduction` of the op
    **dict.fromkeys((aten.mse_loss.default, aten.smooth_l1_loss.default), 2),
    **dict.fromkeys((aten.huber_loss.default, aten.soft_margin_loss.default), 2),
    aten.binary_cross_entropy.default: 3,
    aten.binary_cross_entropy_with_logits.default: 4,
}


def _losses_shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(info(operand).aval.shape for operand in tensor_operands(node))))


def _elementwise_text(node: fx.Node) -> str:
    whole = _losses_shape(node)
    mark = "" if argument(node, "reduction") == _NONE else "+"
    operands = []
    for operand in tensor_operands(node):
        shape = info(operand).aval.shape
        ahead = len(whole) - len(shape)
        named = (f"d{ahead + i}{mark}" if size == whole[ahead + i] else "1" for i, size in enumerate(shape))
        operands.append(pattern(named))
    return f"{', '.join(operands)} -> {pattern(() if mark else dim_names(len(whole)))}"


def _local_elementwise(step: OpContext, *args: Argument, **kwargs: Argument) -> torch.Tensor:
    position, reduction = _ELEMENTWISE[step.node.target], argument(step.node, "reduction")
    if reduction == _NONE or step.choice is None:
        return step.run(*args, **kwargs)
    if position < len(args):
        args = (*args[:position], _NONE, *args[position + 1 :])
    else:
        kwargs = {**kwargs, "reduction": _NONE}
    place = Shard(int(step.choice.factor[1:]), step.choice.outer)
    total = mask_duplicates(step.run(*args, **kwargs), place, step.axis, step.parts).sum()
    return total / math.prod(_losses_shape(step.node)) if reduction == _MEAN else total


rule(_ELEMENTWISE, Rule(_elementwise_text, _local_elementwise, counts=True))
