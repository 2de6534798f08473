"""How an op is called: by which kernel, where torch has a faster one than that which its name stands for, and by which
of its names in Python.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .. import _torch
from ..tracing import Traced

__all__ = ["ONEDNN_MM", "by_transposes", "called_by", "faster_kernel", "prefers_onednn"]

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

    On AMD EPYCs it was measured at 2.3 times the speed of MKL's with AVX-512, and at 0.4 (small) to 1.2 times with AVX2
    alone. Intel's processors were not measured.
    """
    return _torch.has_onednn_linear() and torch.backends.cpu.get_cpu_capability() == "AVX512"


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


_BOUND = (
    aten.add.Tensor,
    aten.cat.default,
    aten.clone.default,
    aten.div.Tensor,
    aten.embedding.default,
    aten.full.default,
    aten.mm.default,
    aten.mul.Tensor,
    aten.native_layer_norm.default,
    aten.neg.default,
    aten.permute.default,
    aten.reshape.default,
    aten.scalar_tensor.default,
    aten.select.int,
    aten.split_with_sizes.default,
    aten.stack.default,
    aten.sub.Tensor,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.where.self,
    aten.zeros.default,
)
_BINDINGS = {op: getattr(torch, op._schema.name.removeprefix("aten::")) for op in _BOUND}


def called_by(op: Any) -> Any:
    """What to call for an op on tensors that nothing differentiates: the least Python and the cheapest arguments.

    Of the commonest ops it is torch's binding of them: half a microsecond less than through `torch.ops`, and 1.5 with a
    list among the arguments.
    """
    op = _torch.stride_free(op)
    return _BINDINGS.get(op) or _torch.direct_call(op)
