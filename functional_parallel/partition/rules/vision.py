"""Convolutions and pooling: batch and channels are free, spatial dims whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from .registry import Rule, rule

aten = torch.ops.aten


def _convolution_text(node: fx.Node) -> str:
    """`convolution(x, w, None, stride, padding, dilation, transposed, output_padding, groups)`; biases come after."""
    ndim = len(node.args[0].meta["val"].shape)
    transposed, groups = node.args[6], node.args[8]
    space = " ".join(f"s{dim}^" for dim in range(ndim - 2))
    kernel = " ".join(f"k{dim}^" for dim in range(ndim - 2))
    out = " ".join(f"new{dim}" for dim in range(ndim - 2))
    if groups != 1:
        return f"~n c^ {space}, ~co^ cg^ {kernel} -> n newc {out}"
    weight = f"~c+ co {kernel}" if transposed else f"~co c+ {kernel}"
    return f"~n c+ {space}, {weight} -> n co {out}"


def _pooling_text(spatial: int, results: int = 1, linear: str = "") -> Callable[[fx.Node], str]:
    def text(node: fx.Node) -> str:
        ndim = len(node.args[0].meta["val"].shape)
        batch = " ".join(f"b{dim}" for dim in range(ndim - spatial))
        space = " ".join(f"s{dim}^" for dim in range(spatial))
        out = f"{batch} {' '.join(f'new{dim}' for dim in range(spatial))}"
        return f"{linear}{batch} {space} -> {', '.join([out] * results)}"

    return text


rule([aten.convolution.default], Rule(_convolution_text))
rule([aten.max_pool2d_with_indices.default], Rule(_pooling_text(2, results=2)))
rule([aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default], Rule(_pooling_text(2, linear="~")))
rule([aten.upsample_nearest2d.default, aten.upsample_bilinear2d.default], Rule(_pooling_text(2, linear="~")))
rule([aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec], Rule(_pooling_text(2, linear="~")))
