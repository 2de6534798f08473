"""One server: all ranks send to rank 0, which adds in rank order and sends the result to all.

This is the obvious implementation, and a bad one: 2 (p − 1) full-size messages pass through one rank, while the links
of all others are idle.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..buffers import ordered_sum
from ..calls import CollectiveSteps
from .algorithm_group import AlgorithmGroup, RankGroup, TaggedMessages

__all__ = ["all_reduce", "gather", "reduce"]

SERVER = 0


def all_reduce(team: AlgorithmGroup, x: Tensor, result: Tensor, accumulated: torch.dtype | None) -> CollectiveSteps:
    """Write the sum into `result`, which is contiguous and may be `x`."""
    messages = team.messages()
    clients = team.others()
    if team.rank != SERVER:
        yield [messages.send(x.contiguous(), SERVER)]
        yield [messages.receive(result, SERVER)]
        return
    received = [torch.empty_like(result) for _ in clients]
    yield [messages.receive(part, client) for part, client in zip(received, clients, strict=True)]
    ordered_sum([x, *received], result, accumulated)
    yield [messages.send(result, client) for client in clients]


def reduce(
    team: RankGroup, messages: TaggedMessages, chunks: Sequence[Tensor], result: Tensor, accumulated: torch.dtype | None
) -> CollectiveSteps:
    """Compute chunk i of the sum on rank i."""
    clients = team.others()
    if team.rank != SERVER:
        sent = [chunk.contiguous() for chunk in chunks]
        yield [messages.receive(result, SERVER), *(messages.send(chunk, SERVER) for chunk in sent)]
        return
    received = [[torch.empty_like(chunk, memory_format=torch.contiguous_format) for chunk in chunks] for _ in clients]
    yield [messages.receive(c, rank) for own, rank in zip(received, clients, strict=True) for c in own]
    sums = [
        ordered_sum(parts, torch.empty_like(parts[1]), accumulated) for parts in zip(chunks, *received, strict=True)
    ]
    result.copy_(sums[SERVER])
    yield [messages.send(sums[client], client) for client in clients]


def gather(team: RankGroup, messages: TaggedMessages, parts: Sequence[Tensor]) -> CollectiveSteps:
    """Receive `parts[i]` from rank i."""
    if team.rank != SERVER:
        yield [messages.send(parts[team.rank], SERVER)]
        yield [messages.receive(part, SERVER) for part in parts]
        return
    yield [messages.receive(parts[client], client) for client in team.others()]
    yield [messages.send(part, client) for client in team.others() for part in parts]
