"""Rules of normalisation over trailing dims, which must be replicated. All other dims may be sharded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from ..op_context import OpContext
from ..registry import Rule, rule
from ..texts import ndim_of

aten = torch.ops.aten


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
