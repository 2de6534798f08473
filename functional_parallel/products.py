"""Which library multiplies matrices, where torch has two of them."""

from __future__ import annotations

import functools
import math
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from . import _torch
from .tracing import Traced

__all__ = ["ONEDNN_MM", "adds_last", "by_transposes", "faster_kernel", "is_wide", "prefers_onednn", "processor"]

aten = torch.ops.aten

_LEAST_WORK = 1 << 20  # multiplications; below, what oneDNN's front end costs (10 µs) is more than it saves
_LEAST_SIDE = 8
_TRIED = ((2, 2, 2), (6, 16, 6), (6, 16, 3), (4, 8, 32), (17, 17, 17), (32, 64, 32))  # rows, inner, columns
_ZEN_5 = 26  # what the processors themselves call their family

_library = torch.library.Library("fp", "FRAGMENT")
_library.define("onednn_mm(Tensor a, Tensor b) -> Tensor")
_library.impl("onednn_mm", _torch.onednn_mm, "CompositeExplicitAutograd")
torch.library.register_fake("fp::onednn_mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), lib=_library)
ONEDNN_MM = torch.ops.fp.onednn_mm.default  # the same kernel as an op, which a compiler leaves as it is


def prefers_onednn() -> bool:
    """Whether oneDNN's float32 product of matrices is there, and the faster one on this processor.

    MKL runs its kernels for AVX-512 on Intel's processors alone. oneDNN was measured at 2.3 times MKL's speed on AMD's
    that multiply 512 bits at once (Zen 5). On those that do it in two halves (Zen 4) large products take 0.9 of the
    time and small ones up to 1.8, whole steps the same; on AMD's with AVX2 alone it has 0.4 (small) to 1.2 times MKL's
    speed, on an Intel Xeon with AVX-512 0.5 (small) to 1.0 times. Only MKL's adds to a sum as it multiplies, so the
    programs of ranks that differ in this differ too, and are refused: with `torch.backends.mkldnn.enabled = False` on
    all of them there is one.
    """
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return _torch.has_onednn_linear() and has_avx512 and is_wide(processor())


@functools.cache
def processor() -> str:
    """What the system says of the processor."""
    linux = Path("/proc/cpuinfo")
    return linux.read_text() if linux.exists() else platform.processor()


def is_wide(processor: str) -> bool:
    """Whether a processor is one of AMD's whose core multiplies 512 bits at once, by what the system says of it."""
    family = re.search(r"family\s*:?\s*(\d+)", processor, re.IGNORECASE)
    return "AuthenticAMD" in processor and family is not None and int(family[1]) >= _ZEN_5


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


def adds_last(like: Any) -> bool:
    """Whether a product that is added to a sum by the kernel itself has the bits of the product, and then the sum.

    Most kernels add when a product is there. MKL's on AMD's Zen 4 begin with the sum, so what a microbatch adds would
    depend on whether a program adds it so. Tried once on few numbers, of float32 and float64 in main memory; numbers of
    half the width are rounded once less then, which is worth more than to have the same bits everywhere.

    Args:
        like: a tensor or an `Aval` of the product's dtype and device.
    """
    return like.device.type != "cpu" or like.dtype not in (torch.float32, torch.float64) or _adds_last(like.dtype)


@functools.cache
def _adds_last(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    with _torch.apart_from_transforms(), torch.no_grad():
        for rows, inner, columns in _TRIED:
            shapes = ((rows, columns), (rows, inner), (inner, columns))
            total, a, b = (torch.randn(shape, generator=generator, dtype=dtype, device="cpu") for shape in shapes)
            if not torch.equal(torch.addmm(total, a, b), total + a @ b):
                return False
    return True


def by_transposes(traced: Traced) -> dict[fx.Node, fx.Node]:
    """Per product of matrices that oneDNN runs on a transpose, what that is the transpose of.

    oneDNN takes its second operand transposed, so there is nothing to transpose.
    """
    products = (node for node in traced.nodes if faster_kernel(node) is not None)
    seconds = ((node, node.args[1]) for node in products)
    return {node: second.args[0] for node, second in seconds if second.target is aten.t.default}
