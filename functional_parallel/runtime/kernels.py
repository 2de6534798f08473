"""Which kernel runs an op, where torch has a faster one than that which its name stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .. import _torch

__all__ = ["ONEDNN_MM", "faster_kernel"]

_LEAST_WORK = 1 << 20  # multiplications; below, what oneDNN's front end costs (10 µs) is more than it saves
_LEAST_SIDE = 8

_library = torch.library.Library("fp", "FRAGMENT")
_library.define("onednn_mm(Tensor a, Tensor b) -> Tensor")
_library.impl("onednn_mm", _torch.onednn_mm, "CompositeExplicitAutograd")
torch.library.register_fake("fp::onednn_mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), lib=_library)
ONEDNN_MM = torch.ops.fp.onednn_mm.default  # the same kernel as an op, which a compiler leaves as it is


def faster_kernel(node: fx.Node) -> Callable[..., Any] | None:
    """Another function for an op that nothing differentiates: oneDNN's float32 product of matrices.

    A function of the op's shapes and of the machine's kind, so that a program gives the same bits every time. Each kind
    of product costs half a megabyte: oneDNN keeps two descriptions of 256 KiB for each pair of shapes and layouts.
    `torch.backends.mkldnn.enabled = False`, before a program first runs, keeps torch's own.
    """
    if node.target is not torch.ops.aten.mm.default:
        return None
    a, b = (operand.meta["val"] for operand in node.args)
    sides = (*a.shape, b.shape[1])
    fits = a.dtype == torch.float32 and a.device.type == "cpu"
    is_worth_it = math.prod(sides) >= _LEAST_WORK and min(sides) >= _LEAST_SIDE
    return _torch.onednn_mm if fits and is_worth_it and _torch.has_onednn_linear() else None
