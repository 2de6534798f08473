"""Which torch functions compute in which type: data, by name.

A name stands for the function of that name in torch, torch.nn.functional, torch.special and torch.linalg, and for the
method of a tensor. The lists follow the reasons of Micikevicius et al. (arXiv 1710.03740 §3.3): products are what
narrow types are fast at, and they accumulate wide in hardware; what sums many terms or leaves a narrow type's range is
computed wide; pointwise functions, bound by memory, compute in the type of what they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["FP32_OPS", "LOSSES", "LOW_PRECISION_OPS", "PROMOTE_OPS", "STATISTICS", "WIDE_RANGE_OPS", "functions_named"]

# In the narrow type.
LOW_PRECISION_OPS = [
    "linear",
    "bilinear",
    "matmul",
    "__matmul__",
    "__rmatmul__",
    "mm",
    "bmm",
    "mv",
    "dot",
    "vdot",
    "inner",
    "tensordot",
    "einsum",
    "multi_dot",
    "chain_matmul",
    "addmm",
    "addmv",
    "addbmm",
    "baddbmm",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "scaled_dot_product_attention",
    "multi_head_attention_forward",
]

# In float32, the result in the type of the operand; but for what float16, which ends at 65,504, may not hold though it
# holds the operand: there it stays in float32, or the square of 256 would be infinite, and a norm of it zero. bfloat16
# ends where float32 does.
WIDE_RANGE_OPS = [
    "norm",
    "vector_norm",
    "matrix_norm",
    "dist",
    "cdist",
    "pairwise_distance",
    "exp",
    "exp2",
    "expm1",
    "pow",
    "float_power",
    "square",
    "reciprocal",
    "__pow__",
    "__rpow__",
    "__rtruediv__",
    "sinh",
    "cosh",
    "tan",
    "sum",
    "nansum",
    "prod",
    "cumsum",
    "cumprod",
    "trace",
    "var",
    "var_mean",
]

# In float32, the result in the type of the operand; the ones above among them.
FP32_OPS = [
    *WIDE_RANGE_OPS,
    "softmax",
    "log_softmax",
    "softmin",
    "gumbel_softmax",
    "logsumexp",
    "logcumsumexp",
    "logaddexp",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "batch_norm",
    "instance_norm",
    "local_response_norm",
    "normalize",
    "renorm",
    "cosine_similarity",
    "log",
    "log2",
    "log10",
    "log1p",
    "rsqrt",
    "sqrt",
    "asin",
    "acos",
    "erfinv",
    "softplus",
    "mean",
    "nanmean",
    "std",
    "std_mean",
]

# In float32, and so the result.
LOSSES = [
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "kl_div",
    "ctc_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "poisson_nll_loss",
    "gaussian_nll_loss",
    "cosine_embedding_loss",
    "hinge_embedding_loss",
    "margin_ranking_loss",
    "soft_margin_loss",
    "multi_margin_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
]

# In the widest type among the operands: torch refuses these when types differ.
PROMOTE_OPS = [
    "index_put",
    "index_add",
    "index_copy",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "masked_scatter",
    "lerp",
    "addcmul",
    "addcdiv",
    "grid_sample",
    "cross",
]

# Parameters that are no parameters but running statistics: they are updated, a little at a time.
STATISTICS = ("*running_mean", "*running_var")

_HOMES = (torch, torch.nn.functional, torch.special, torch.linalg, torch.Tensor)


def functions_named(names: Iterable[str | Callable[..., Any]]) -> frozenset[Any]:
    """The functions and methods of these names; functions stand for themselves.

    Raises:
        ValueError: for a name that no torch function has.
    """
    found: set[Any] = set()
    for name in names:
        if callable(name):
            found.add(name)
            continue
        homes = [home for home in _HOMES if hasattr(home, name)]
        if not homes:
            raise ValueError(f"there is no torch function or method {name!r}; give its name, or the function itself")
        found.update(getattr(home, name) for home in homes)
    return frozenset(found)
