"""Rules of convolutions and pooling. Batch and channels may be sharded; spatial dims are replicated."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.nn import functional

from ...tracing import Replaced, intercept
from ..registry import Rule, rule
from ..texts import batched_text, ndim_of

aten = torch.ops.aten


def _convolution_text(node: fx.Node) -> str:
    # A partition adds the bias by a separate op. With a bias the op is not linear: each rank would add it.
    linear, add, bias = ("~", "+", "") if node.args[2] is None else ("", "^", ", co")
    ndim = ndim_of(node)
    transposed, groups = node.args[6], node.args[8]
    space = " ".join(f"s{dim}^" for dim in range(ndim - 2))
    kernel = " ".join(f"k{dim}^" for dim in range(ndim - 2))
    out = " ".join(f"new{dim}" for dim in range(ndim - 2))
    if groups != 1:
        return f"{linear}n c^ {space}, {linear}co^ cg^ {kernel}{bias} -> n newc {out}"
    weight = f"{linear}c{add} co {kernel}" if transposed else f"{linear}co c{add} {kernel}"
    return f"{linear}n c{add} {space}, {weight}{bias} -> n co {out}"


def _sampling_text(node: fx.Node) -> str:
    space = [f"s{dim}" for dim in range(ndim_of(node) - 2)]
    places = [f"g{dim}" for dim in range(len(space))]
    return f"~n c {'^ '.join(space)}^, n {' '.join(places)} xy^ -> n c {' '.join(places)}"


rule([aten.convolution.default], Rule(_convolution_text))
rule([aten.grid_sampler_2d.default, aten.grid_sampler_3d.default], Rule(_sampling_text))
rule([aten.max_pool2d_with_indices.default, aten.adaptive_max_pool2d.default], Rule(batched_text(2)))
rule([aten.max_pool3d_with_indices.default, aten.adaptive_max_pool3d.default], Rule(batched_text(3)))
rule([aten.max_unpool2d.default], Rule(batched_text(2)))
rule([aten.max_unpool3d.default], Rule(batched_text(3)))

#: linear ops on images, with the number of image dims that must be replicated; also in their backward ops
OF_IMAGES = {
    **dict.fromkeys((aten.upsample_nearest1d, aten.upsample_linear1d, aten._upsample_nearest_exact1d), 1),
    **dict.fromkeys((aten.reflection_pad1d, aten.replication_pad1d), 1),
    **dict.fromkeys((aten.upsample_nearest2d, aten.upsample_bilinear2d, aten.upsample_bicubic2d), 2),
    **dict.fromkeys((aten._upsample_nearest_exact2d, aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa), 2),
    **dict.fromkeys((aten.avg_pool2d, aten._adaptive_avg_pool2d, aten.reflection_pad2d, aten.replication_pad2d), 2),
    **dict.fromkeys((aten.upsample_nearest3d, aten.upsample_trilinear3d, aten._upsample_nearest_exact3d), 3),
    **dict.fromkeys((aten.avg_pool3d, aten._adaptive_avg_pool3d, aten.reflection_pad3d, aten.replication_pad3d), 3),
    **dict.fromkeys((aten.pixel_shuffle, aten.pixel_unshuffle, aten.im2col), 3),
    aten.col2im: 2,
}
for packet, count in OF_IMAGES.items():
    overloads = [getattr(packet, name) for name in ("default", "vec") if name in packet.overloads()]
    rule(overloads, Rule(batched_text(count, linear="~")))


def _pool_to_one(dims: int, input: Tensor, output_size: int | Sequence[int | None] | None) -> Replaced:
    """Compute pooling to one element as a mean, as torch does, but without relabelling the strides of the result."""
    # torch relabels the strides of a channels-last tensor in place, by an op that has no rule and no traced backward.
    sizes = output_size if isinstance(output_size, (tuple, list)) else [output_size]
    return input.mean(tuple(range(-dims, 0)), keepdim=True) if set(sizes) == {1} else NotImplemented


intercept(functional.adaptive_avg_pool1d, always=True)(functools.partial(_pool_to_one, 1))
intercept(functional.adaptive_avg_pool2d, always=True)(functools.partial(_pool_to_one, 2))
intercept(functional.adaptive_avg_pool3d, always=True)(functools.partial(_pool_to_one, 3))
