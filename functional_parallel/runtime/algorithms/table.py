"""The algorithms, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import direct, shared
from .running import Steps
from .shared_memory import SharedMemory
from .team import Team

__all__ = ["ALGORITHMS", "Algorithm"]

Gather = Callable[[Team, Tensor, Sequence[Tensor]], Steps]
Exchange = Callable[[Team, Sequence[Tensor], Sequence[Tensor]], Steps]
Scatter = Callable[[Team, Sequence[Tensor], Tensor, "torch.dtype | None"], Steps]
Reduce = Callable[[Team, Tensor, Tensor, "torch.dtype | None"], Steps]


@dataclass(frozen=True)
class Algorithm:
    """How collectives go over a team.

    Attributes:
        name: what it is called, in the field and in `FUNCTIONAL_PARALLEL_ALGORITHM`.
        is_ordered: whether it adds in rank order.
        refuses: why it cannot serve a team; None where it can.
        all_reduce: into its third argument, which may be the operand.
        reduce_scatter: from chunks by rank, into one of them.
        all_gather: from an operand, into parts by rank.
        all_to_all: from chunks by rank into parts by rank; None where the algorithm has no word on it.
    """

    name: str
    is_ordered: bool
    refuses: Callable[[Team], str | None]
    all_reduce: Reduce
    reduce_scatter: Scatter
    all_gather: Gather
    all_to_all: Exchange | None = None


def _never(team: Team) -> str | None:
    return None


def _several_hosts(team: Team) -> str | None:
    return None if team.is_on_one_host and team.shared is not None else "its ranks share no memory"


def _memory(team: Team) -> SharedMemory:
    assert team.shared is not None
    return team.shared


_DIRECT = Algorithm(
    "direct", True, _never, direct.all_reduce, direct.reduce_scatter, direct.all_gather, direct.all_to_all
)
_SHARED = Algorithm(
    "shared",
    True,
    _several_hosts,
    lambda team, *rest: shared.all_reduce(_memory(team), *rest),
    lambda team, *rest: shared.reduce_scatter(_memory(team), *rest),
    lambda team, *rest: shared.all_gather(_memory(team), *rest),
    lambda team, *rest: shared.all_to_all(_memory(team), *rest),
)

ALGORITHMS: dict[str, Algorithm] = {each.name: each for each in (_DIRECT, _SHARED)}
