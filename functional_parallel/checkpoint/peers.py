"""The processes of a run, as a checkpoint uses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import CheckpointError


@dataclass(frozen=True)
class Peers:
    rank: int  # of this process
    size: int
    ranks: Sequence[int]  # of the mesh, in this process
    exchange: Callable[[Any, str], list[Any]]  # returns the values of all processes, which all call it
    store: dist.Store | None  # that all processes reach; None for one process
    missing: Callable[[], str]  # returns text on a process that died, else ""
    timeout: float  # seconds that a process waits for the others

    def agree(self, problem: str, doing: str) -> None:
        every = self.exchange(problem, doing)
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(every) if text)
        if told:
            raise CheckpointError(told if self.size > 1 else next(filter(None, every)))
