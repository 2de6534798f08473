"""Rules of normalisation. Batch and instance norm are recorded as sums, so batch norm of a sharded batch is SyncBN."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from ...tracing import Replaced, intercept
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import ndim_of

aten = torch.ops.aten

# --- Over trailing dims, which must be replicated; all other dims may be sharded ---


def _trailing_text(statistics: int) -> Callable[[fx.Node], str]:
    """Return the rule for `x` and its optional weight and bias over the normalised dims, of size one in statistics."""

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
    """Rule of `native_group_norm(x, weight, bias, N, C, HxW, groups, eps)`. Only the batch may be sharded."""
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
    """Compute `F.batch_norm` by ops that have sharding rules. Training uses the statistics of the global batch.

    The input has shape (batch, channels, …). Running statistics are updated in place, like torch does.
    """
    shape = [1, -1] + [1] * (input.ndim - 2)
    dims = [0, *range(2, input.ndim)]
    if training or running_mean is None or running_var is None:
        mean = input.mean(dims)
        centred = input - mean.reshape(shape)
        variance = (centred * centred).mean(dims)
        if running_mean is not None and running_var is not None:
            count = input.numel() // input.shape[1]
            running_mean.copy_(running_mean * (1 - momentum) + mean.detach() * momentum)
            unbiased = variance.detach() * (count / max(count - 1, 1))
            running_var.copy_(running_var * (1 - momentum) + unbiased * momentum)
    else:
        centred, variance = input - running_mean.reshape(shape), running_var
    return _scaled(centred * torch.rsqrt(variance + eps).reshape(shape), weight, bias, shape)


def _scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: list[int]) -> Tensor:
    x = x * weight.reshape(shape) if weight is not None else x
    return x + bias.reshape(shape) if bias is not None else x


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
    """Compute `F.instance_norm` by the statistics of each sample and channel."""
    # With running statistics, torch's function is recorded.
    if running_mean is not None or not use_input_stats or input.ndim < 3:
        return NotImplemented
    dims, shape = list(range(2, input.ndim)), [1, -1] + [1] * (input.ndim - 2)
    centred = input - input.mean(dims, keepdim=True)
    return _scaled(centred * torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps), weight, bias, shape)
