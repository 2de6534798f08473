"""Direct exchange: every rank sends each other rank its chunk at the same time. One round, sums in rank order.

It moves the fewest bytes in the fewest rounds. If p (p − 1) simultaneous messages are too many for the network, a ring
is better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..buffers import ordered_sum
from ..calls import CollectiveSteps
from .algorithm_group import AlgorithmGroup, RankGroup, TaggedMessages


def all_to_all(team: AlgorithmGroup, chunks: Sequence[Tensor], parts: Sequence[Tensor]) -> CollectiveSteps:
    """Send chunk i to rank i, and receive the chunk of rank i into `parts[i]`, which is contiguous."""
    messages = team.messages()
    parts[team.rank].copy_(chunks[team.rank])
    sent = [chunks[other].contiguous() for other in team.others()]  # kept until everything is sent
    receiving = [messages.receive(parts[other], other) for other in team.others()]
    yield [*receiving, *(messages.send(chunk, other) for chunk, other in zip(sent, team.others(), strict=True))]


def reduce(team: RankGroup, messages: TaggedMessages, chunks: Sequence[Tensor], result: Tensor) -> CollectiveSteps:
    """Compute chunk i of the sum on rank i."""
    parts = {other: torch.empty_like(result) for other in team.others()}
    sent = [chunks[other].contiguous() for other in team.others()]
    receiving = [messages.receive(part, other) for other, part in parts.items()]
    yield [*receiving, *(messages.send(chunk, other) for chunk, other in zip(sent, team.others(), strict=True))]
    parts[team.rank] = chunks[team.rank]
    buffer = parts[0 if team.rank else 1]  # not the result, which may be this rank's chunk
    result.copy_(ordered_sum([parts[rank] for rank in range(team.size)], buffer))


def gather(team: RankGroup, messages: TaggedMessages, parts: Sequence[Tensor]) -> CollectiveSteps:
    """Receive `parts[i]` from rank i. `parts[team.rank]` already holds this rank's operand."""
    receiving = [messages.receive(parts[other], other) for other in team.others()]
    yield [*receiving, *(messages.send(parts[team.rank], other) for other in team.others())]
