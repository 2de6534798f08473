"""Compute dtypes of torch functions, as lists of names (Micikevicius et al., arXiv 1710.03740 §3.3).

A name represents the function of that name in torch, torch.nn.functional, torch.special and torch.linalg, and the
tensor method. Pointwise functions, which are in no list, compute in the dtype of their operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

# In low precision.
LOW_PRECISION_OPS = [
    *("linear", "bilinear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "dot", "vdot", "inner"),
    *("tensordot", "einsum", "multi_dot", "chain_matmul", "addmm", "addmv", "addbmm", "baddbmm", "conv1d", "conv2d"),
    *("conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"),
    "multi_head_attention_forward",
]

# In float32, with the result in the dtype of the operand. With float16, which ends at 65,504, the result stays in
# float32, because it may leave the range of float16 although the operand does not. Otherwise the square of 256 would be
# infinite, and a norm of it zero. bfloat16 has the range of float32.
WIDE_RANGE_OPS = [
    *("norm", "vector_norm", "matrix_norm", "dist", "cdist", "pairwise_distance", "exp", "exp2", "expm1", "pow"),
    *("float_power", "square", "reciprocal", "__pow__", "__rpow__", "__rtruediv__", "sinh", "cosh", "tan", "sum"),
    *("nansum", "prod", "cumsum", "cumprod", "trace", "var", "var_mean"),
]

# In float32, with the result in the dtype of the operand. Includes WIDE_RANGE_OPS.
FP32_OPS = [
    *WIDE_RANGE_OPS,
    *("softmax", "log_softmax", "softmin", "gumbel_softmax", "logsumexp", "logcumsumexp", "logaddexp", "layer_norm"),
    *("rms_norm", "group_norm", "batch_norm", "instance_norm", "local_response_norm", "normalize", "renorm"),
    *("cosine_similarity", "log", "log2", "log10", "log1p", "rsqrt", "sqrt", "asin", "acos", "erfinv", "softplus"),
    *("mean", "nanmean", "std", "std_mean"),
]

# Of FP32_OPS, those with kernels on devices other than the CPU that read and write low precision, and compute and
# accumulate in float32. They have the same results without casts of their operands and results.
FP32_INSIDE = ["layer_norm", "rms_norm", "softmax", "log_softmax"]

# In float32, with the result in float32.
LOSSES = [
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "ctc_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss", "gaussian_nll_loss"),
    *("cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss", "multi_margin_loss"),
    *("multilabel_margin_loss", "multilabel_soft_margin_loss", "triplet_margin_loss"),
    "triplet_margin_with_distance_loss",
]

# In the widest dtype of the operands: torch raises an error for these functions if dtypes differ.
PROMOTE_OPS = [
    *("index_put", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce", "masked_scatter", "lerp"),
    *("addcmul", "addcdiv", "grid_sample", "cross"),
]

# Running statistics, which are not trained. They change by small updates, which low precision would lose.
STATISTICS = ("*running_mean", "*running_var")

_HOMES = (torch, torch.nn.functional, torch.special, torch.linalg, torch.Tensor)


def functions_named(names: Iterable[str | Callable[..., Any]]) -> frozenset[Any]:
    """Return the functions and methods with these names. Functions in `names` are returned unchanged."""
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
