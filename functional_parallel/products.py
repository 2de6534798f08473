"""Which library multiplies matrices, where torch has two of them."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import _torch
from .tracing import Traced

__all__ = ["ONEDNN_MM", "by_transposes", "faster_kernel", "is_from_intel", "prefers_onednn"]

aten = torch.ops.aten

_LEAST_WORK = 1 << 20  # multiplications; below, what oneDNN's front end costs (10 µs) is more than it saves
_LEAST_SIDE = 8

_library = torch.library.Library("fp", "FRAGMENT")
_library.define("onednn_mm(Tensor a, Tensor b) -> Tensor")
_library.impl("onednn_mm", _torch.onednn_mm, "CompositeExplicitAutograd")
torch.library.register_fake("fp::onednn_mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), lib=_library)
ONEDNN_MM = torch.ops.fp.onednn_mm.default  # the same kernel as an op, which a compiler leaves as it is


def prefers_onednn() -> bool:
    """Whether oneDNN's float32 product of matrices is there, and the faster one on this processor.

    MKL runs its kernels for AVX-512 on Intel's processors alone. On AMD EPYCs oneDNN was measured at 2.3 times MKL's
    speed with AVX-512, and at 0.4 (small products) to 1.2 times with AVX2 alone; on an Intel Xeon with AVX-512 at 0.5
    (small) to 1.0 times. Only MKL's adds to a sum as it multiplies, so the programs of ranks that differ in this differ
    too, and are refused: with `torch.backends.mkldnn.enabled = False` on all of them there is one.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return _torch.has_onednn_linear() and has_avx512 and not is_from_intel()


@functools.cache
def is_from_intel() -> bool:
    """Whether this processor is one of Intel's."""
    linux = Path("/proc/cpuinfo")
    return "GenuineIntel" in (linux.read_text() if linux.exists() else platform.processor())


def faster_kernel(node: fx.Node) -> Callable[..., Any] | None:
    """Another function for an op that nothing differentiates: oneDNN's float32 product of matrices.

    A function of the op's shapes and of the machine's kind, so that a program gives the same bits every time. Each kind
    of product costs half a megabyte: oneDNN keeps two descriptions of 256 KiB for each pair of shapes and layouts.
    `torch.backends.mkldnn.enabled = False`, before a program first runs, keeps torch's own.
    """
    if node.target is not aten.mm.default:
        return None
    a, b = (operand.meta["val"] for operand in node.args)
    sides = (*a.shape, b.shape[1])
    fits = a.dtype == torch.float32 and a.device.type == "cpu"
    is_worth_it = math.prod(sides) >= _LEAST_WORK and min(sides) >= _LEAST_SIDE
    return _torch.onednn_mm if fits and is_worth_it and prefers_onednn() else None


def by_transposes(traced: Traced) -> dict[fx.Node, fx.Node]:
    """Per product of matrices that oneDNN runs on a transpose, what that is the transpose of.

    oneDNN takes its second operand transposed, so there is nothing to transpose.
    """
    products = (node for node in traced.nodes if faster_kernel(node) is not None)
    seconds = ((node, node.args[1]) for node in products)
    return {node: second.args[0] for node, second in seconds if second.target is aten.t.default}
