"""Rules of the library's own ops: collectives and casts of other axes, and constraints.

They occur when an outer axis is partitioned. A collective over another axis acts on each element or along one dim. If
that dim is also sharded on the axis being partitioned, the ranks of the other axis become a factor inside or outside
the split.
"""

from __future__ import annotations

import math

import torch

from sharding_specs.blocks import inside, nested

from ..checker import DECLARED
from ..collectives import mesh_axis_size
from ..ir import the_call
from ..ops import CONSTRAIN, OUTPUTS, TO_MEMORY
from ..rules import REPLICATED, OpContext, OpSharding, Rule, Shard, ndim_of, rule, whole_along

ops = torch.ops.fp


def _other_size(step: OpContext) -> int:
    return math.prod(map(mesh_axis_size, the_call(step.node).axes))


def _decide_gather(step: OpContext) -> OpSharding:
    """Decide for `all_gather`: the ranks of the other axis become the outermost factor of the dim."""
    place, dim = step.operands[0].place, the_call(step.node).dim
    if isinstance(place, Shard) and place.dim == dim:
        return OpSharding((place,), (Shard(dim, nested(_other_size(step), place.outer)),))
    return OpSharding((place,), (place,))


def _decide_scatter(step: OpContext) -> OpSharding:
    """Decide for a scatter, which slices the outermost factor of the dim. A split inside that factor survives."""
    place, dim = step.operands[0].place, the_call(step.node).dim
    if isinstance(place, Shard) and place.dim == dim:
        outer = inside(place.outer, _other_size(step))
        return OpSharding((REPLICATED,), (REPLICATED,)) if outer is None else OpSharding((place,), (Shard(dim, outer),))
    return OpSharding((place,), (place,))


_ELEMENTWISE = (ops.psum, ops.pcast, ops.ppermute, ops.pbroadcast, ops.broadcast, ops.reduce)
rule([*(op.default for op in _ELEMENTWISE), DECLARED, OUTPUTS, TO_MEMORY], Rule("~... -> ..."))
rule([ops.pmax.default, ops.pmin.default], Rule("... -> ..."))
rule([ops.all_gather.default, ops.gather.default], Rule(decide=_decide_gather))
rule([ops.psum_scatter.default, ops.pscatter.default, ops.scatter.default], Rule(decide=_decide_scatter))
rule([ops.all_to_all.default], Rule(lambda node: whole_along(*the_call(node).dims, ndim=ndim_of(node))))
rule([ops.axis_index.default], Rule(decide=lambda step: OpSharding((), (REPLICATED,))))


def _decide_constraint(step: OpContext) -> OpSharding:
    place = step.operands[0].place
    for axis, dim, outer in zip(*step.node.args[1:4], strict=True):
        if axis == step.axis:
            place = Shard(dim, outer) if dim >= 0 else REPLICATED
    return OpSharding((place,), (place,))


rule([CONSTRAIN], Rule(decide=_decide_constraint))
