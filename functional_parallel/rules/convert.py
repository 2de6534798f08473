"""Convert a value from its layout to the layout that an op requires.

Reduced means replicated with an unreduced gradient. Varying operand means a replicated operand of a rank-dependent op.

| from → to | collective | its transpose |
|---|---|---|
| replicated → varying operand | `pvary` | psum |
| replicated → Reduced | `pcast` to Reduced | psum |
| Reduced → varying operand | `pcast` | `pcast` |
| Reduced → replicated | `pbroadcast` from one rank | the gradient on that rank, zeros on the others |
| replicated → sharded | `pscatter`, a slice | all_gather |
| sharded → replicated | `all_gather` | psum_scatter, or a slice if every use is replicated |
| sharded → sharded on another dim | `all_to_all` | all_to_all |
| partial sums → replicated | `psum` | pvary |
| partial sums → sharded | `psum_scatter` | all_gather |
| constant → partial sums | none: the value on one rank, zeros on the others | |
| owned → varying operand | `broadcast` | reduce |
| owned → replicated | `broadcast`, for an op with an explicit cast | reduce of the owner's gradient |
| owned → sharded | `scatter` | gather |
| sharded → owned | `gather` | scatter |
| partial sums → owned | `gather`, and the owner adds | scatter |

Owned values exist only in a partition with an owner. Its ops on full operands run on the owner.
"""

from __future__ import annotations

import functools
import operator

import torch

from sharding_specs.blocks import by_block, by_rank

from ..collectives import MICROBATCH, DimSplit, apply_primitive, axis_index, axis_size
from ..ir import is_trained
from .axis_layout import REDUCED, REPLICATED, AxisLayout, Owned, Partial, Reduced, Replicated, Shard
from .duplicates import add_duplicates, drop_duplicates

REPLICATED_VARYING = "replicated, with rank-dependent gradients"
TargetLayout = AxisLayout | str


def convert(x: torch.Tensor, held: AxisLayout, form: TargetLayout, axis: str, parts: DimSplit) -> torch.Tensor:
    """Convert a shard between layouts. The gradient of REPLICATED_VARYING is summed over the ranks."""
    if held == form:
        return x
    if isinstance(held, Owned):
        return _from_owner(x, held.rank, form, axis, parts)
    if isinstance(form, Owned):
        return _to_owner(x, held, form.rank, axis, parts)
    if form == REPLICATED_VARYING:
        if isinstance(held, Shard):
            return _gather(x, held, axis, parts, "varying")
        if isinstance(held, Reduced):
            return apply_primitive("pcast", x, (axis,), "reduced", "varying")
        return apply_primitive("pcast", convert(x, held, REPLICATED, axis, parts), (axis,), "invariant", "varying")
    if form == REDUCED:
        if isinstance(held, Shard):
            return _gather(x, held, axis, parts, "reduced")
        return apply_primitive("pcast", convert(x, held, REPLICATED, axis, parts), (axis,), "invariant", "reduced")
    if isinstance(form, Replicated):
        if isinstance(held, Partial):
            return apply_primitive("psum", x, (axis,), "varying")
        if isinstance(held, Reduced):
            return apply_primitive("pbroadcast", apply_primitive("pcast", x, (axis,), "reduced", "varying"), (axis,), 0)
        assert isinstance(held, Shard)
        return _gather(x, held, axis, parts, "invariant")
    if isinstance(form, Partial):  # a derivative may reach what is zeros, such as a product with a zero tangent
        return on_one_rank(apply_primitive("pcast", x, (axis,), "invariant", "varying") if is_trained(x) else x, axis)
    assert isinstance(form, Shard), f"nothing is turned into {form}"
    if isinstance(held, Partial):
        return _scatter("psum_scatter", add_duplicates(x, form, parts), form, axis, "varying")
    if isinstance(held, Replicated):
        return _scatter("pscatter", add_duplicates(x, form, parts), form, axis)
    if isinstance(held, Reduced):
        return _own_part(apply_primitive("pcast", x, (axis,), "reduced", "varying"), form, axis, parts)
    return _reshard(x, held, form, axis, parts)


def on_one_rank(x: torch.Tensor, axis: str) -> torch.Tensor:
    """Return a constant as partial sums: the value on the first rank, and zeros on the others."""
    return torch.where((axis_index(axis) == 0).to(x.device), x, torch.zeros_like(x))


def _from_owner(x: torch.Tensor, owner: int, form: TargetLayout, axis: str, parts: DimSplit) -> torch.Tensor:
    if isinstance(form, Shard):
        return _scatter("scatter", add_duplicates(x, form, parts), form, axis, owner)
    state = "varying" if form == REPLICATED_VARYING else "invariant"
    return apply_primitive("broadcast", x, (axis,), owner, state)


def _to_owner(x: torch.Tensor, held: AxisLayout, owner: int, axis: str, parts: DimSplit) -> torch.Tensor:
    if isinstance(held, Shard):
        return _gather(x, held, axis, parts, owner)
    assert isinstance(held, Partial), f"{held} is not turned into a value of one rank"
    each = apply_primitive("gather", x.unsqueeze(0), (axis,), 0, owner)
    return functools.reduce(operator.add, each.unbind())  # in rank order, as every sum


def _own_part(x: torch.Tensor, form: Shard, axis: str, parts: DimSplit) -> torch.Tensor:
    index = axis_index(axis).to(x.device).reshape(1)
    if isinstance(form.outer, tuple):
        x, outer = by_rank(x, form.dim, form.outer, parts.ranks), 1
    else:
        x, outer = add_duplicates(x, form, parts), form.outer
    split = x.unflatten(form.dim, (outer, parts.ranks, -1))
    result: torch.Tensor = split.index_select(form.dim + 1, index).flatten(form.dim, form.dim + 2)
    return result


def _reshard(x: torch.Tensor, held: Shard, form: Shard, axis: str, parts: DimSplit) -> torch.Tensor:
    side_by_side = axis != MICROBATCH  # microbatches run sequentially and cannot exchange data
    if side_by_side and held.outer == form.outer == 1 and held.dim != form.dim and parts.divide(x.shape[form.dim]):
        return apply_primitive("all_to_all", x, (axis,), form.dim, held.dim)
    return _scatter("pscatter", add_duplicates(_gather(x, held, axis, parts, "invariant"), form, parts), form, axis)


def _gather(x: torch.Tensor, held: Shard, axis: str, parts: DimSplit, to: str | int) -> torch.Tensor:
    dim, operation = held.dim, "gather" if isinstance(to, int) else "all_gather"
    if held.outer == 1:
        return drop_duplicates(apply_primitive(operation, x, (axis,), dim, to), held, parts)
    if isinstance(held.outer, tuple):
        return by_block(apply_primitive(operation, x, (axis,), dim, to), dim, held.outer, parts.ranks)
    gathered = apply_primitive(operation, x.unflatten(dim, (held.outer, -1)), (axis,), dim + 1, to)
    return drop_duplicates(gathered.flatten(dim, dim + 1), held, parts)


def _scatter(operation: str, x: torch.Tensor, form: Shard, axis: str, *params: str | int) -> torch.Tensor:
    dim = form.dim
    if form.outer == 1:
        return apply_primitive(operation, x, (axis,), dim, *params)
    if isinstance(form.outer, tuple):
        return apply_primitive(operation, by_rank(x, dim, form.outer, axis_size(axis)), (axis,), dim, *params)
    part = apply_primitive(operation, x.unflatten(dim, (form.outer, -1)), (axis,), dim + 1, *params)
    return part.flatten(dim, dim + 1)
