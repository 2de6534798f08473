"""Rules of softmax and cross entropy. If the classes are sharded, no rank holds the full logits.

For tokens t and classes c the loss is log Σ_c exp z[t, c] − z[t, target]. Ranks reduce three tensors of one number per
token: the maximum, the sum of exponentials, and the target's logit. (Megatron-LM does the same; arXiv 1909.08053 §3.)
Counts, class weights and ignored targets are global, regardless of the sharding.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ... import collectives as fp
from ...collectives import MICROBATCH, hidden_axes
from ...ir import Traced, info
from ..duplicates import reduction_identity
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import dim_names, dim_of, ndim_of, pattern
from .reductions import logsumexp_over_ranks

aten = torch.ops.aten

_MEAN, _SUM = 1, 2  # torch's codes for reduction=


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    """Compute `nll_loss(log_softmax(logits))` and the total weight. A traced graph contains it as one op."""
    logarithms = logits.log_softmax(-1)
    loss, total = aten.nll_loss_forward.default(logarithms, target, weight, reduction, ignore)
    return loss, total


def fuse_cross_entropy(traced: Traced) -> None:
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
    """Rule for scores of shape `(n, c)`, or `(c)` for one sample."""
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
    """Compute loss and total weight from per-token terms. The decision determines which sums stay partial."""
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
    """Compute −log p(target) per token. If the classes are sharded, the result is replicated."""
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
