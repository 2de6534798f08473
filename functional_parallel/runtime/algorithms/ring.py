"""Ring: every rank sends to the next rank and receives from the previous one, in p − 1 rounds.

An all-reduce moves 2 (p − 1) / p · n bytes per rank, the minimum of all algorithms, over p links that are always busy:
P. Patarasu and X. Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, J. Parallel
Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..calls import CollectiveSteps
from .algorithm_group import RankGroup, TaggedMessages


def reduce_scatter_steps(
    team: RankGroup, messages: TaggedMessages, chunks: Sequence[Tensor], result: Tensor
) -> CollectiveSteps:
    """Compute chunk i of the sum on rank i. It starts at rank i + 1, and every rank on its path adds its operand."""
    after, before = _neighbours(team)
    travelling = chunks[before].contiguous()
    for step in range(team.size - 1):
        mine = chunks[(team.rank - 2 - step) % team.size]
        arriving = torch.empty_like(mine, memory_format=torch.contiguous_format)
        yield [messages.receive(arriving, before), messages.send(travelling, after)]
        travelling = arriving.add_(mine)
    result.copy_(travelling)


def all_gather_steps(team: RankGroup, messages: TaggedMessages, parts: Sequence[Tensor]) -> CollectiveSteps:
    """Receive `parts[i]` from rank i. Each part is forwarded when it arrives."""
    after, before = _neighbours(team)
    for step in range(team.size - 1):
        here, coming = (team.rank - step) % team.size, (team.rank - step - 1) % team.size
        yield [messages.receive(parts[coming], before), messages.send(parts[here], after)]


def _neighbours(team: RankGroup) -> tuple[int, int]:
    return (team.rank + 1) % team.size, (team.rank - 1) % team.size
