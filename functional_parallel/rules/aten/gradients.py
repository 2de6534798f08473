"""Rules of backward ops, which a trace contains if a loss takes derivatives itself (penalties, nested steps).

Most are linear in the incoming gradient, their first operand. Ops that cannot run on shards are decomposed into
simpler ops instead (see `partition.decompose`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import Argument

from ...ir import info, tensor_operands
from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import all_whole_text, batched_text, linear_text, ndim_of, pattern, pointwise_text
from .vision import OF_IMAGES

aten = torch.ops.aten

# --- Elementwise ops ---


def _with_buffer_text(node: fx.Node) -> str:
    _, x, buffer = (info(operand).aval.shape for operand in tensor_operands(node))
    return "~..., ..., ... -> ..." if x == buffer else all_whole_text(node)


rule(
    [
        *(aten.elu_backward.default, aten.leaky_relu_backward.default, aten.softplus_backward.default),
        *(aten.hardsigmoid_backward.default, aten.hardswish_backward.default, aten.hardtanh_backward.default),
        *(aten.mish_backward.default, aten.hardshrink_backward.default, aten.softshrink_backward.default),
    ],
    Rule(linear_text("~.")),
)
rule([aten.native_dropout_backward.default], Rule(linear_text("~.")))
rule([aten.log_sigmoid_backward.default], Rule(_with_buffer_text))
rule([aten._prelu_kernel_backward.default], Rule(pointwise_text))

# --- Convolutions, pooling, resizing, padding ---


def _convolution_text(node: fx.Node) -> str:
    # The gradient of the bias lacks the channels of x.
    space, transposed, groups, wanted = ndim_of(node) - 2, node.args[7], node.args[9], node.args[10]
    out, into, kernel = ([f"{of}{dim}" for dim in range(space)] for of in "oik")
    c, co = ("c^", "co^") if groups != 1 or wanted[2] else ("c+", "co+")
    co = co if groups != 1 else "co+"
    weight = ["a", "b"] if groups != 1 else ["c", "co"] if transposed else ["co", "c"]
    marked = {"c": c, "co": co, "a": "a^", "b": "b^"}
    whole = [" ".join(f"{name}^" for name in names) for names in (out, into, kernel)]
    operands = [f"~n+ {co} {whole[0]}", f"n+ {c} {whole[1]}", f"{' '.join(marked[name] for name in weight)} {whole[2]}"]
    return f"{', '.join(operands)} -> n c {' '.join(into)}, {' '.join([*weight, *kernel])}, co"


def _local_convolution(
    step: OpContext, gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *args: Argument
) -> Tensor:
    return step.run(gradient, x, weight, [gradient.shape[1]] if bias_sizes else bias_sizes, *args)


def _local_resizing(
    step: OpContext, gradient: Tensor, size: Sequence[int] | None, of_input: Sequence[int], *args: Argument
) -> Tensor:
    return step.run(gradient, size, [*gradient.shape[:2], *of_input[2:]], *args)


def _local_contiguous(step: OpContext, *args: Argument) -> Tensor:
    """Run the op on contiguous copies. Torch's kernel treats a one-channel shard as channels-last: wrong numbers."""
    copies = (arg.clone(memory_format=torch.contiguous_format) if isinstance(arg, Tensor) else arg for arg in args)
    return step.run(*copies)


_MAX_POOLS = {aten.max_pool2d_with_indices: 2, aten.adaptive_max_pool2d: 2, aten.max_pool3d_with_indices: 3}

rule([aten.convolution_backward.default], Rule(_convolution_text, _local_convolution))
rule([aten.adaptive_max_pool3d_backward.default], Rule(batched_text(3, linear="~"), _local_contiguous))
for packet, count in {**OF_IMAGES, **_MAX_POOLS}.items():
    name = f"{packet.__name__}_backward"
    if hasattr(aten, name):
        local = _local_resizing if "upsample" in name else None  # these have the sizes as arguments
        rule([getattr(aten, name).default], Rule(batched_text(count, linear="~"), local))

# --- Norms and tables ---


def _layer_norm_text(node: fx.Node) -> str:
    trailing = len(node.args[2])
    batch = [f"b{dim}" for dim in range(ndim_of(node) - trailing)]
    normed = [f"n{dim}" for dim in range(trailing)]
    held, whole = [f"{name}+" for name in batch], [f"{name}^" for name in normed]
    statistic = pattern([*held, *["1"] * trailing])
    scales = [pattern(whole)] * sum(isinstance(arg, fx.Node) for arg in node.args[5:7])
    operands = [f"~{pattern(held + whole)}", pattern(held + whole), statistic, statistic, *scales]
    return f"{', '.join(operands)} -> {', '.join([pattern(batch + normed), *[pattern(normed)] * 2])}"


def _embedding_text(node: fx.Node) -> str:
    mark = "^" if node.args[4] else "+"  # lookups of a row are counted over all indices
    index = " ".join(f"i{dim}{mark}" for dim in range(ndim_of(node) - 1))
    return f"~{index} d, {index or '()'} -> newv d"


rule([aten.native_layer_norm_backward.default], Rule(_layer_norm_text))
rule([aten.embedding_dense_backward.default], Rule(_embedding_text))
