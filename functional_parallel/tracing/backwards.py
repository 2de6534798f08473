"""torch's fused backward ops, of derivatives that a loss takes itself, as what they compute.

Such a derivative is split and differentiated like the rest of the loss, and fused ops have no sharding rules, nor
always derivatives. What one saves is an operand, or the result itself, whose history goes on from there; or else it is
written anew here, because torch gives no history to statistics and buffers beside a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _torch

__all__ = ["parts_of"]

aten = torch.ops.aten

_AS_TORCH_SAYS = {
    aten._log_softmax_backward_data.default,
    aten._prelu_kernel_backward.default,
    aten._softmax_backward_data.default,
    aten.binary_cross_entropy_backward.default,
    aten.elu_backward.default,
    aten.glu_backward.default,
    aten.hardswish_backward.default,
    aten.huber_loss_backward.default,
    aten.leaky_relu_backward.default,
    aten.max_pool2d_with_indices_backward.default,
    aten.mse_loss_backward.default,
    aten.nll_loss2d_backward.default,
    aten.nll_loss_backward.default,
    aten.select_backward.default,
    aten.slice_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.softplus_backward.default,
}


def parts_of(op: Any) -> Callable[..., Any] | None:
    """A function of other ops that gives what a backward op does; None for ops that are recorded as they are."""
    return _torch.decomposition_of(op) if op in _AS_TORCH_SAYS else _WRITTEN.get(op)


def _layer_norm(
    gradient: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    mean: torch.Tensor,
    rstd: torch.Tensor,
    *others: Any,
) -> Any:
    mean, rstd = _statistics(x, list(range(x.ndim - len(shape), x.ndim)), rstd)
    return _made_of(aten.native_layer_norm_backward.default)(gradient, x, shape, mean, rstd, *others)


def _group_norm(
    gradient: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: Any,
    samples: int,
    channels: int,
    positions: int,
    groups: int,
    *others: Any,
) -> Any:
    rows = x.reshape(samples, groups, -1)
    mean, rstd = (each.squeeze(2) for each in _statistics(rows, [2], rstd.unsqueeze(2)))
    sizes = (samples, channels, positions, groups)
    return _made_of(aten.native_group_norm_backward.default)(gradient, x, mean, rstd, weight, *sizes, *others)


def _statistics(x: torch.Tensor, dims: list[int], rstd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1 / standard deviation, with their history; what was added to the variance is taken from the latter."""
    x = x.to(rstd.dtype)
    mean = x.mean(dims, keepdim=True)
    variance = (x - mean).square().mean(dims, keepdim=True)
    return mean, (rstd.detach() ** -2 + (variance - variance.detach())).rsqrt()


def _log_sigmoid(gradient: torch.Tensor, x: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return gradient * torch.sigmoid(-x)


def _made_of(op: Any) -> Callable[..., Any]:
    found = _torch.decomposition_of(op)
    assert found is not None, f"torch does not say what {op} is made of"
    return found


_WRITTEN: dict[Any, Callable[..., Any]] = {
    aten.log_sigmoid_backward.default: _log_sigmoid,
    aten.native_group_norm_backward.default: _group_norm,
    aten.native_layer_norm_backward.default: _layer_norm,
}
