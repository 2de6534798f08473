"""Every rank sends every other one its part at once: one round of p − 1 messages each, sums in rank order.

It moves the fewest bytes and has the fewest steps; on a network whose switches it overloads, a ring is better.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .running import Steps
from .sums import ordered_sum
from .team import Messages, Team

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


def all_gather(team: Team, mine: Tensor, parts: Sequence[Tensor]) -> Steps:
    """`parts[i]`, contiguous, becomes the value of rank i."""
    parts[team.rank].copy_(mine)
    yield from _gather(team, team.messages(), parts)


def all_to_all(team: Team, chunks: Sequence[Tensor], parts: Sequence[Tensor]) -> Steps:
    """Chunk i goes to rank i; `parts[i]`, contiguous, becomes what rank i sent here."""
    parts[team.rank].copy_(chunks[team.rank])
    messages = team.messages()
    receiving = [messages.receive(parts[other], other) for other in team.others()]
    yield [*receiving, *(messages.send(chunks[other].contiguous(), other) for other in team.others())]


def reduce_scatter(
    team: Team, chunks: Sequence[Tensor], result: Tensor, accumulated: torch.dtype | None = None
) -> Steps:
    """Chunk i of the sum on rank i, into `result`, which is contiguous."""
    yield from _reduce(team, team.messages(), chunks, result, accumulated)


def all_reduce(team: Team, x: Tensor, result: Tensor, accumulated: torch.dtype | None = None) -> Steps:
    """The sum, into `result`, which is contiguous and may be `x`: each rank adds a part, and sends it to the others."""
    messages = team.messages()
    parts = result.view(-1).tensor_split(team.size)
    yield from _reduce(team, messages, x.reshape(-1).tensor_split(team.size), parts[team.rank], accumulated)
    yield from _gather(team, messages, parts)


def _reduce(
    team: Team, messages: Messages, chunks: Sequence[Tensor], result: Tensor, accumulated: torch.dtype | None
) -> Steps:
    parts = {other: torch.empty_like(result) for other in team.others()}
    receiving = [messages.receive(part, other) for other, part in parts.items()]
    sent = [chunks[other].contiguous() for other in team.others()]  # kept until all has left
    yield [*receiving, *(messages.send(chunk, other) for chunk, other in zip(sent, team.others(), strict=True))]
    parts[team.rank] = chunks[team.rank]
    ordered_sum([parts[rank] for rank in range(team.size)], accumulated, result)


def _gather(team: Team, messages: Messages, parts: Sequence[Tensor]) -> Steps:
    receiving = [messages.receive(parts[other], other) for other in team.others()]
    yield [*receiving, *(messages.send(parts[team.rank], other) for other in team.others())]
