"""Rules of normalisation. Of a sharded batch, batch norm is decomposed into means over all ranks, which is SyncBN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from ... import _torch
from ...ir import tensor_operands
from ...tracing import Replaced, intercept, intercept_op
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import ndim_of

aten = torch.ops.aten

# --- Over trailing dims, which must be replicated; all other dims may be sharded ---


def _trailing_text(statistics: int) -> Callable[[fx.Node], str]:
    def text(node: fx.Node) -> str:
        trailing = len(node.args[1])
        batch = [f"b{dim}" for dim in range(ndim_of(node) - trailing)]
        normed = [f"n{dim}^" for dim in range(trailing)]
        scales = sum(isinstance(arg, fx.Node) for arg in node.args[2:4])
        operands = [" ".join(batch + normed)] + [" ".join(normed)] * scales
        results = [" ".join(batch + [f"n{dim}" for dim in range(trailing)])]
        results += [" ".join(batch + ["1"] * trailing)] * statistics
        return f"{', '.join(operands)} -> {', '.join(results)}"

    return text


def _group_norm_text(node: fx.Node) -> str:
    rest = " ".join(f"r{dim}^" for dim in range(1, ndim_of(node)))
    scales = ["r1^"] * sum(isinstance(arg, fx.Node) for arg in node.args[1:3])
    plain = rest.replace("^", "")
    return f"{', '.join([f'n {rest}', *scales])} -> n {plain}, n newg, n newg"


def _local_group_norm(
    step: OpContext, x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, *args: float
) -> Tensor:
    return step.run(x, weight, bias, x.shape[0], *args)


rule([aten.native_layer_norm.default], Rule(_trailing_text(2)))
rule([aten._fused_rms_norm.default], Rule(_trailing_text(1)))


def _batch_norm_text(node: fx.Node) -> str:
    """Rule of `native_batch_norm` for the channels, and for all dims on one rank. The rest is decomposed."""
    rest = [f"r{dim}" for dim in range(2, ndim_of(node))]
    x = " ".join(f"{name}+" for name in ["n", *rest])
    scales = ["c"] * (len(tensor_operands(node)) - 1)
    operands = ", ".join([x.replace("+", "+ c", 1), *scales])
    return f"{operands} -> {' '.join(['n', 'c', *rest])}, c, c"  # statistics, which are empty if not in training


rule([aten.native_batch_norm.default], Rule(_batch_norm_text))
rule([aten.native_group_norm.default], Rule(_group_norm_text, _local_group_norm))


# --- Batch norm and instance norm ---


@intercept(torch.nn.functional.batch_norm, inside=True)
@intercept(torch.nn.functional.batch_norm)
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    own = training or running_mean is None or running_var is None
    normed = batch_norm_formula if _torch.differentiating_level() else aten.native_batch_norm.default
    if not own:
        return normed(input, weight, bias, running_mean, running_var, False, 0.0, eps)[0]
    result, mean, rstd = normed(input, weight, bias, None, None, True, 0.0, eps)
    _update(input, running_mean, running_var, mean.detach(), rstd.detach(), momentum, eps)
    return result


@intercept_op(aten.native_batch_norm.default)
def _with_update(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    # The op writes into the running statistics, which its schema does not declare.
    if not training or (running_mean is None and running_var is None):
        return NotImplemented
    found: tuple[Tensor, Tensor, Tensor] = aten.native_batch_norm.default(
        input, weight, bias, None, None, True, 0.0, eps
    )
    _update(input, running_mean, running_var, *found[1:], momentum, eps)
    return found


def _update(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    momentum: float,
    eps: float,
) -> None:
    if running_mean is not None:
        running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
    if running_var is not None:
        count, variance = x.numel() // x.shape[1], rstd.square().reciprocal() - eps
        running_var.copy_(running_var * (1 - momentum) + variance * (count / max(count - 1, 1)) * momentum)


def batch_norm_formula(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `native_batch_norm` without an update of statistics, by ops that have sharding rules and derivatives."""
    shape, dims = [1, -1] + [1] * (x.ndim - 2), [0, *range(2, x.ndim)]
    if training or mean is None or variance is None:
        mean = x.mean(dims)
        centred = x - mean.reshape(shape)
        variance = (centred * centred).mean(dims)
    else:
        centred = x - mean.reshape(shape)
    rstd = torch.rsqrt(variance + eps)
    x = centred * rstd.reshape(shape)
    x = x * weight.reshape(shape) if weight is not None else x
    if not training and x.device.type == "cpu":  # as torch's kernel there
        mean = rstd = x.new_zeros(0)
    return x + bias.reshape(shape) if bias is not None else x, mean, rstd


@intercept(torch.nn.functional.instance_norm, always=True)
def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Replaced:
    # With running statistics, torch's function is recorded.
    if running_mean is not None or not use_input_stats or input.ndim < 3:
        return NotImplemented
    samples = input.shape[0]
    weight, bias = (None if each is None else each.repeat(samples) for each in (weight, bias))
    found = batch_norm(input.reshape(1, -1, *input.shape[2:]), None, None, weight, bias, True, eps=eps)
    return found.reshape(input.shape)
