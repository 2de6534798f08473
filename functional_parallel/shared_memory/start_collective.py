"""Start one collective: return its steps, and a function that computes the result."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..runtime import PendingCollective, cat_or_view
from . import collectives, slots
from .mapped_memory import CollectiveSteps, SharedMemory
from .packed import LazyBucket, Operand, to_tensor
from .unpacked import BucketLayout, BucketOutput, DirectOutputs, FlatOutputs, SlicedBucket

Started = tuple[CollectiveSteps, Callable[[], Tensor | BucketOutput]]


def all_reduce(memory: SharedMemory, x: Operand, *, overwrite: bool, layout: BucketLayout | None) -> Started:
    """Sum over the ranks, into the operand's memory if `overwrite`. A layout requests slices of the sum."""
    operand = _resolved(x)
    # up to `AT_ONCE` bytes are sent in one piece and added in one op
    if layout is not None and isinstance(operand, LazyBucket) and operand.nbytes > slots.AT_ONCE:
        sums = operand.results()
        return collectives.all_reduce(memory, operand, sums), lambda: FlatOutputs(sums)
    if isinstance(operand, LazyBucket):
        result = operand.empty()
    elif overwrite and operand.is_contiguous():
        result = operand
    else:
        result = torch.empty_like(operand, memory_format=torch.contiguous_format)
    return collectives.all_reduce(memory, operand, result), lambda: _unpacked(result, layout)


def reduce_scatter(
    memory: SharedMemory, x: Operand, dim: int, *, overwrite: bool, layout: BucketLayout | None
) -> Started:
    operand = _resolved(x)
    if isinstance(operand, LazyBucket):
        result = operand.empty(operand.shape.numel() // memory.size)
        return collectives.reduce_scatter(memory, operand, result), lambda: result
    chunks = operand.chunk(memory.size, dim)
    result = torch.empty_like(chunks[0], memory_format=torch.contiguous_format)
    return collectives.reduce_scatter(memory, chunks, result), lambda: result


def all_gather(memory: SharedMemory, x: Operand, dim: int, *, overwrite: bool, layout: BucketLayout | None) -> Started:
    operand = _resolved(x)
    if layout is not None:
        leaves = DirectOutputs(layout, operand.dtype, operand.device)
        if isinstance(operand, LazyBucket):
            leaves.keep(memory.rank, operand.tensors)
        return collectives.all_gather(memory, operand, leaves), lambda: leaves
    if dim > 0:  # each rank's shard is written to its destination, like a bucket of one tensor
        assert isinstance(operand, Tensor)
        alone = BucketLayout(memory.size, ((0, tuple(operand.shape), dim),))
        leaf = DirectOutputs(alone, operand.dtype, operand.device)
        return collectives.all_gather(memory, operand.reshape(-1), leaf), lambda: leaf.take(0)
    shape = (memory.size, *operand.shape)
    parts = torch.empty(shape, dtype=operand.dtype, device=operand.device).unbind()
    return collectives.all_gather(memory, operand, parts), lambda: cat_or_view(parts, dim)


def all_to_all(
    memory: SharedMemory, x: Operand, split_dim: int, concat_dim: int, *, overwrite: bool, layout: BucketLayout | None
) -> Started:
    operand = _resolved(to_tensor(x))
    assert isinstance(operand, Tensor)
    chunks = operand.chunk(memory.size, split_dim)
    parts = operand.new_empty((memory.size, *chunks[0].shape)).unbind()
    return collectives.all_to_all(memory, chunks, parts), lambda: cat_or_view(parts, concat_dim)


START: dict[str, Callable[..., Started]] = {
    "psum": all_reduce,
    "psum_scatter": reduce_scatter,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
}


def on_result(pending: PendingCollective, layout: BucketLayout | None) -> PendingCollective:
    """Return a collective by another transport. With a layout, its result has the tensors in the full result."""
    return pending if layout is None else pending.then(lambda result: SlicedBucket(layout, result))


def _unpacked(whole: Tensor, layout: BucketLayout | None) -> Tensor | BucketOutput:
    return whole if layout is None else SlicedBucket(layout, whole)


def _resolved(x: Operand) -> Operand:
    return x if isinstance(x, LazyBucket) else x.detach().resolve_conj().resolve_neg()
