"""Recursive halving, then doubling: log₂ p rounds each. The distance to the partner halves, then doubles.

It moves the same number of bytes as a ring in fewer rounds, for a power-of-two number of ranks. Other numbers use the
ring. R. Thakur, R. Rabenseifner and W. Gropp, Optimization of collective communication operations in MPICH, Int. J.
High Perform. Comput. Appl. 19 (2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ..buffers import flat_or_view
from ..calls import CollectiveSteps
from . import ring
from .algorithm_group import RankGroup, TaggedMessages

__all__ = ["gather", "is_power_of_two", "reduce"]


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def reduce(
    team: RankGroup, messages: TaggedMessages, chunks: Sequence[Tensor], result: Tensor, accumulated: torch.dtype | None
) -> CollectiveSteps:
    """Compute chunk i of the sum on rank i. Each round sends the half of the chunks that the partner's side keeps."""
    if not is_power_of_two(team.size):
        yield from ring.reduce_scatter_steps(team, messages, chunks, result, accumulated)
        return
    dtype = accumulated or result.dtype
    sums = torch.cat([chunk.reshape(-1).to(dtype) for chunk in chunks])
    ends = [0, *accumulate(chunk.numel() for chunk in chunks)]

    def span(first: int, last: int) -> Tensor:
        return sums[ends[first] : ends[last]]

    first, last = 0, team.size
    while last - first > 1:
        half = (last - first) // 2
        middle, partner = first + half, team.rank ^ half
        low = team.rank < middle
        kept, given = (span(first, middle), span(middle, last)) if low else (span(middle, last), span(first, middle))
        arriving = torch.empty_like(kept)
        yield [messages.receive(arriving, partner), messages.send(given, partner)]
        kept += arriving
        first, last = (first, middle) if low else (middle, last)
    result.copy_(span(first, last).view(result.shape))


def gather(team: RankGroup, messages: TaggedMessages, parts: Sequence[Tensor]) -> CollectiveSteps:
    """Receive `parts[i]` from rank i. The parts are contiguous. Each round doubles the data that a rank has."""
    if not is_power_of_two(team.size):
        yield from ring.all_gather_steps(team, messages, parts)
        return
    flat = [part.view(-1) for part in parts]
    length = 1
    while length < team.size:
        partner = team.rank ^ length
        mine, theirs = (flat_or_view(flat[first : first + length]) for first in _aligned(length, team.rank, partner))
        yield [messages.receive(theirs, partner), messages.send(mine, partner)]
        length *= 2


def _aligned(length: int, *ranks: int) -> list[int]:
    return [rank // length * length for rank in ranks]
