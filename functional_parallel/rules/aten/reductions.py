"""Rules of reductions. Over a sharded dim, sums stay partial, and other reductions combine the ranks immediately."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ... import collectives as fp
from ...ir import argument, info, operands_of, reached
from ..duplicates import reduction_identity
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import along_text, dim_names, ndim_of, pattern, results_of

aten = torch.ops.aten


def reduced_dims(node: fx.Node) -> list[int]:
    """Return the dims that an op reduces; all dims if it names none."""
    ndim, given = ndim_of(node), argument(node, "dim")
    if isinstance(given, int):
        given = [given]
    return sorted(dim % ndim for dim in given) if given and ndim else list(range(ndim))


def _reduction_text(mark: str, linear: str = "") -> Callable[[fx.Node], str]:
    def text(node: fx.Node) -> str:
        ndim, dims = ndim_of(node), reduced_dims(node)
        keepdim = info(node).result(0).ndim == ndim
        left = pattern(dim_names(ndim, {dim: f"d{dim}{mark}" for dim in dims}))
        right = pattern(dim_names(ndim, dict.fromkeys(dims, "1" if keepdim else "")))
        return f"{linear}{left} -> {', '.join([right] * results_of(node))}"

    return text


def _histc_text(node: fx.Node) -> str:
    """Rule of `histc`. Counts per bin are summed over ranks; if the data determine the bins, no dim may be sharded."""
    whole = argument(node, "min") == argument(node, "max")
    names = {dim: f"d{dim}^" if whole else f"d{dim}+" for dim in range(ndim_of(node))}
    return f"{pattern(dim_names(ndim_of(node), names))} -> newbin"


def _local_mean(
    step: OpContext,
    x: Tensor,
    dims: int | Sequence[int] | None = None,
    keepdim: bool = False,
    **kwargs: torch.dtype | None,
) -> Tensor:
    wanted = reduced_dims(step.node)
    count = math.prod(step.operands[0].aval.shape[dim] for dim in wanted)
    if not wanted:
        return step.run(x, *([dims, keepdim] if dims is not None else []), **kwargs)
    return x.sum(wanted, keepdim=keepdim, **kwargs) / count


def _local_variance(step: OpContext, x: Tensor, *args: Argument, **kwargs: Argument) -> Tensor | tuple[Tensor, Tensor]:
    if not _reduces_ranks(step):
        return step.run(x, *args, **kwargs)
    dims, keepdim = reduced_dims(step.node), bool(step.node.kwargs.get("keepdim", False))
    correction = step.node.kwargs.get("correction", 1)
    count = math.prod(step.operands[0].aval.shape[dim] for dim in dims)
    mean = fp.psum(step.once(x).sum(dims, keepdim=True), step.axis) / count
    centred = step.once(x - fp.pvary(mean, step.axis))
    total = fp.psum((centred * centred).sum(dims, keepdim=keepdim), step.axis)
    variance = total / max(count - (1 if correction is None else correction), 0)
    spread = variance.sqrt() if step.node.target in (aten.std.correction, aten.std_mean.correction) else variance
    if step.node.target in (aten.var_mean.correction, aten.std_mean.correction):
        return spread, mean if keepdim else mean.reshape(variance.shape)
    return spread


def _reduces_ranks(step: OpContext) -> bool:
    place = step.decision.operands[0]
    return getattr(place, "dim", None) in reduced_dims(step.node)


def _local_logsumexp(step: OpContext, x: Tensor, dims: int | Sequence[int], keepdim: bool = False) -> Tensor:
    if not _reduces_ranks(step):
        return step.run(x, dims, keepdim)
    x = step.once(x, reduction_identity(x.dtype))
    return logsumexp_over_ranks(x, reduced_dims(step.node), keepdim, step.axis)


def logsumexp_over_ranks(x: Tensor, dims: list[int], keepdim: bool, axis: str) -> Tensor:
    """Compute log Σ exp over dims, one of them sharded, by one pmax (without a gradient) and one psum."""
    if any(x.shape[dim] == 0 for dim in dims):  # an empty dim has no maximum
        return fp.psum(x.exp().sum(dims, keepdim=keepdim), axis).log()
    sizes = x.detach().real if x.is_complex() else x.detach()
    top = fp.pmax(sizes.amax(dims, keepdim=True), axis)
    top = torch.where(top.isfinite(), top, 0)  # if all elements are -inf, subtract 0
    total = fp.psum((x - top).exp().sum(dims, keepdim=keepdim), axis)
    return total.log() + (top if keepdim else top.reshape(total.shape))


def _local_extremum(step: OpContext, x: Tensor, dims: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    """Compute the global extremum. As in torch, elements that tie share its gradient evenly, across all ranks."""
    if not _reduces_ranks(step):
        return step.run(*([x, dims, keepdim] if len(step.node.args) > 1 else [x]))
    largest = step.node.target in (aten.amax.default, aten.max.default)
    wanted = reduced_dims(step.node)
    x = step.once(x, reduction_identity(x.dtype, 1 if largest else -1))
    own = x.detach().amax(wanted, keepdim=True) if largest else x.detach().amin(wanted, keepdim=True)
    best = (fp.pmax if largest else fp.pmin)(own, step.axis)
    whole = best if keepdim else best.squeeze(wanted)
    if not x.is_floating_point() or _is_detached(step.node):
        return whole
    best = fp.pvary(best, step.axis)
    ties = x == best
    count = fp.psum(ties.to(x.dtype).sum(wanted, keepdim=keepdim), step.axis)
    excess = torch.where(ties & x.isfinite(), x - x.detach(), 0)
    return whole + fp.psum(excess.sum(wanted, keepdim=keepdim), step.axis) / count


def _is_detached(node: fx.Node) -> bool:
    before = reached([node], lambda each: [] if each.target is aten.detach.default else operands_of(each))
    return all(each.op != "placeholder" for each in before)


rule([aten.sum.dim_IntList, aten.sum.default], Rule(_reduction_text("+", "~")))
rule([aten.mean.dim, aten.mean.default], Rule(_reduction_text("+", "~"), _local_mean))
rule(
    [aten.amax.default, aten.max.default, aten.amin.default, aten.min.default],
    Rule(_reduction_text("!"), _local_extremum, casts=True, counts=True),
)
rule([aten.max.dim, aten.min.dim], Rule(_reduction_text("^")))
rule([aten.argmax.default, aten.argmin.default, aten.prod.default, aten.prod.dim_int], Rule(_reduction_text("^")))
rule([aten.any.default, aten.any.dim, aten.any.dims], Rule(_reduction_text("^")))
rule([aten.all.default, aten.all.dim, aten.all.dims], Rule(_reduction_text("^")))
rule([aten.count_nonzero.default, aten.count_nonzero.dim_IntList, aten.nansum.default], Rule(_reduction_text("+")))
rule([aten.histc.default], Rule(_histc_text))
rule([aten.aminmax.default, aten.median.dim, aten.nanmedian.dim], Rule(_reduction_text("^")))
rule([aten.norm.ScalarOpt_dim, aten.linalg_vector_norm.default], Rule(_reduction_text("^")))
rule(
    [aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.std_mean.correction],
    Rule(_reduction_text("!"), _local_variance, casts=True, counts=True),
)
rule([aten.logsumexp.default], Rule(_reduction_text("!"), _local_logsumexp, casts=True, counts=True))


# --- Along one dim, same shape out: cumulative sums, sorts ---


rule([aten.cumsum.default], Rule(along_text("~")))
rule([aten.cumprod.default, aten.glu.default], Rule(along_text()))
rule([aten.logcumsumexp.default], Rule(along_text(), whole_gradient=True))  # its derivative takes log of the gradient
rule([aten.cummax.default, aten.cummin.default], Rule(along_text()))
rule([aten.sort.default, aten.sort.stable, aten.topk.default], Rule(along_text()))
