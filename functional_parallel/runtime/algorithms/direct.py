"""Every rank sends every other one its part at once: one round, sums in rank order.

It moves the fewest bytes in the fewest rounds; where p (p − 1) messages at once are too many for a network, a ring is
better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..buffers import ordered_sum
from ..calls import CollectiveSteps
from .algorithm_group import AlgorithmGroup, RankGroup, TaggedMessages

__all__ = ["all_to_all", "gather", "reduce"]


def all_to_all(team: AlgorithmGroup, chunks: Sequence[Tensor], parts: Sequence[Tensor]) -> CollectiveSteps:
    """Chunk i goes to rank i; `parts[i]`, contiguous, becomes what rank i sent here."""
    messages = team.messages()
    parts[team.rank].copy_(chunks[team.rank])
    sent = [chunks[other].contiguous() for other in team.others()]  # kept until all has left
    receiving = [messages.receive(parts[other], other) for other in team.others()]
    yield [*receiving, *(messages.send(chunk, other) for chunk, other in zip(sent, team.others(), strict=True))]


def reduce(
    team: RankGroup, messages: TaggedMessages, chunks: Sequence[Tensor], result: Tensor, accumulated: torch.dtype | None
) -> CollectiveSteps:
    """Chunk i of the sum on rank i."""
    parts = {other: torch.empty_like(result) for other in team.others()}
    sent = [chunks[other].contiguous() for other in team.others()]
    receiving = [messages.receive(part, other) for other, part in parts.items()]
    yield [*receiving, *(messages.send(chunk, other) for chunk, other in zip(sent, team.others(), strict=True))]
    parts[team.rank] = chunks[team.rank]
    buffer = parts[0 if team.rank else 1]  # not into the result, which may be this rank's chunk
    result.copy_(ordered_sum([parts[rank] for rank in range(team.size)], buffer, accumulated))


def gather(team: RankGroup, messages: TaggedMessages, parts: Sequence[Tensor]) -> CollectiveSteps:
    """`parts[i]` becomes that of rank i; a rank's own is there already."""
    receiving = [messages.receive(parts[other], other) for other in team.others()]
    yield [*receiving, *(messages.send(parts[team.rank], other) for other in team.others())]
