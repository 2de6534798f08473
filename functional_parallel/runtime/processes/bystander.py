"""Runtime of a process that is not on a mesh over part of the processes: it takes part in moves of states only."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from sharding_specs import Mesh, P

from ...errors import LaunchError
from ...program import Program
from ..interface import Runtime


class Elsewhere:
    """Handle of a value that other processes hold."""


class Bystander(Runtime[Elsewhere, Program]):
    """Holds nothing and runs nothing. It is the runtime of a mesh in every process that the mesh does not have."""

    holders = "real processes"
    own_ranks = ()

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    @property
    def process(self) -> int:
        return dist.get_rank()

    def shard(self, x: torch.Tensor, spec: P) -> Elsewhere:
        return Elsewhere()

    def assemble(self, *args: Any) -> Elsewhere:
        return Elsewhere()

    def whole(self, *args: Any) -> NoReturn:
        raise LaunchError(
            f"process {self.process} is not on {self.mesh!r}: of the training on this mesh, it calls train.init and "
            "train.load only, with all others"
        )

    shard_of = like = run = run_whole = replay = cast(Any, whole)
