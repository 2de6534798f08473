"""Cost of recomputing an op, from its shapes alone."""

from __future__ import annotations

import math

import torch
from torch import fx

from sharding_specs import Mesh

from .. import _torch
from ..ir import OPS_ON_SHAPES, Aval, info, operands_of, walk_args
from ..ops import is_move
from .aliasing import view_base
from .traffic import collective_of

aten = torch.ops.aten

# Flops in the time of a byte read or written, and of a byte sent. Machines differ by a factor of ten either way. Only
# the order matters: elementwise ops are cheap compared to products, and communication is expensive.
_PER_BYTE_MOVED = 8
_PER_BYTE_SENT = 100
_PER_BYTE_OF_A_LINK = 1000  # between memories
_TAKE = {aten.embedding.default, aten.index.Tensor, aten.index_select.default, aten.gather.default}


def flops(node: fx.Node) -> int:
    """Floating-point operations of a product, a convolution or a fused attention; 0 for other ops."""
    from torch.utils.flop_counter import flop_registry  # lazy, because it searches for optional packages

    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return 0
    args, kwargs = walk_args((node.args, node.kwargs), lambda a: _shape(info(a).val) if isinstance(a, fx.Node) else a)
    counted = (_torch.functional_variant(target) or target).overloadpacket
    if counted in flop_registry:
        return int(flop_registry[counted](*args, **kwargs, out_val=_shape(info(node).val)))
    if target._schema.name in ("fp::grouped_mm", "fp::grouped_outer"):
        return int(2 * math.prod(args[0]) * args[1][-1])
    if target.namespace == "aten" and target._schema.name.startswith("aten::_scaled_dot_product"):
        # Kernels that torch's counter does not know. A backward recomputes the scores and computes four gradients.
        backward = "backward" in target._schema.name
        query, key, value = args[1:4] if backward else args[:3]
        rows = math.prod(query[:-1]) * key[-2]
        return int(2 * rows * ((3 * query[-1] + 2 * value[-1]) if backward else query[-1] + value[-1]))
    return 0


def recompute_cost(node: fx.Node, mesh: Mesh) -> int:
    """Cost of an op in flops: its own flops, plus the bytes that it reads, writes, moves and sends at fixed rates."""
    if view_base(node) is not None:
        return 0
    collective = collective_of(node, mesh)
    sent = 0 if collective is None else collective.bytes
    linked = info(node).nbytes if is_move(node) else 0
    return flops(node) + _PER_BYTE_MOVED * bytes_moved(node) + _PER_BYTE_SENT * sent + _PER_BYTE_OF_A_LINK * linked


def bytes_moved(node: fx.Node) -> int:
    """Bytes that an op reads and writes. An op that takes rows of a table reads the size of its result from it."""
    of_shape = node.args[0] if node.target in OPS_ON_SHAPES else None  # its values are not read
    read = [node if node.target in _TAKE and each is node.args[0] else each for each in operands_of(node)]
    read = [each for each in read if each is not of_shape]
    return sum(info(each).nbytes for each in (node, *read))


def _shape(value: Aval | tuple[Aval | None, ...] | None) -> object:
    if isinstance(value, tuple):
        return [_shape(each) for each in value]
    return None if value is None else torch.Size(value.shape)
