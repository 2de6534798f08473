"""Start one collective with one algorithm: return its steps and a function that computes the result.

Results are allocated before the first step, because algorithms receive into them. Operands are passed unchanged, or as
a bucket if the algorithm copies its operand.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...collectives import slots
from ..buffers import (
    BucketLayout,
    BucketOutput,
    DirectOutputs,
    FlatOutputs,
    LazyBucket,
    Operand,
    SlicedBucket,
    cat_or_view,
    to_tensor,
)
from ..calls import CollectiveSteps
from .algorithm_group import AlgorithmGroup
from .table import Algorithm

StartedCollective = tuple[CollectiveSteps, Callable[[], Tensor | BucketOutput]]


def all_reduce(
    algorithm: Algorithm, team: AlgorithmGroup, x: Operand, overwrite: bool, layout: BucketLayout | None = None
) -> StartedCollective:
    """Sum over the ranks, into the operand's memory if `overwrite`. A layout requests slices of the sum.

    An operand with a layout is flat. If it is a bucket, the layout has one slice per tensor, in their order.
    """
    operand = _as_it_lies(algorithm, x)
    # up to `AT_ONCE` bytes are sent in one piece and added in one op
    if layout is not None and isinstance(operand, LazyBucket) and operand.nbytes > slots.AT_ONCE:
        sums = operand.results()
        return algorithm.all_reduce(team, operand, sums), lambda: FlatOutputs(sums)
    if isinstance(operand, LazyBucket):
        result = operand.empty()
    elif overwrite and operand.is_contiguous():
        result = operand
    else:
        result = torch.empty_like(operand, memory_format=torch.contiguous_format)
    return algorithm.all_reduce(team, operand, result), lambda: unpack_bucket(result, layout)


def reduce_scatter(algorithm: Algorithm, team: AlgorithmGroup, x: Operand, dim: int) -> StartedCollective:
    """Sum over the ranks and return this rank's chunk along a dim."""
    operand = _as_it_lies(algorithm, x)
    if isinstance(operand, LazyBucket):
        result = operand.empty(operand.shape.numel() // team.size)
        return algorithm.reduce_scatter(team, operand, result), lambda: result
    chunks = operand.chunk(team.size, dim)
    result = torch.empty_like(chunks[0], memory_format=torch.contiguous_format)
    return algorithm.reduce_scatter(team, chunks, result), lambda: result


def all_gather(
    algorithm: Algorithm, team: AlgorithmGroup, x: Operand, dim: int, layout: BucketLayout | None = None
) -> StartedCollective:
    """Concatenate all ranks' operands along a dim. With a layout, they are flat; return the tensors packed in them."""
    operand = _as_it_lies(algorithm, x)
    if layout is not None and algorithm.packs:
        leaves = DirectOutputs(layout, operand.dtype, operand.device)
        if isinstance(operand, LazyBucket):
            leaves.keep(team.rank, operand.tensors)
        return algorithm.all_gather(team, operand, leaves), lambda: leaves
    if dim > 0 and algorithm.packs:  # each rank's shard is written to its destination, like a bucket of one tensor
        assert isinstance(operand, Tensor)
        alone = DirectOutputs(BucketLayout(team.size, ((0, tuple(operand.shape), dim),)), operand.dtype, operand.device)
        return algorithm.all_gather(team, operand.reshape(-1), alone), lambda: alone.take(0)
    shape = (team.size, *operand.shape)
    parts = torch.empty(shape, dtype=operand.dtype, device=operand.device).unbind()
    return algorithm.all_gather(team, operand, parts), lambda: unpack_bucket(cat_or_view(parts, dim), layout)


def unpack_bucket(whole: Tensor, layout: BucketLayout | None = None) -> Tensor | BucketOutput:
    """Return the full tensor, or with a layout the tensors in it."""
    return whole if layout is None else SlicedBucket(layout, whole)


def all_to_all(
    algorithm: Algorithm, team: AlgorithmGroup, x: Tensor, split_dim: int, concat_dim: int
) -> StartedCollective:
    """Exchange chunks and concatenate the received ones along a dim, by an algorithm with an `all_to_all`."""
    assert algorithm.all_to_all is not None, algorithm.name
    chunks = resolved(x).chunk(team.size, split_dim)
    parts = x.new_empty((team.size, *chunks[0].shape)).unbind()
    return algorithm.all_to_all(team, chunks, parts), lambda: cat_or_view(parts, concat_dim)


def resolved(x: Tensor) -> Tensor:
    """Return the values with conjugation and negation bits resolved, detached."""
    return x.detach().resolve_conj().resolve_neg()


def _as_it_lies(algorithm: Algorithm, x: Operand) -> Operand:
    return x if isinstance(x, LazyBucket) and algorithm.packs else resolved(to_tensor(x))
