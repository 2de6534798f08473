"""Which runtime a mesh gets: real processes under a launcher, simulated ranks without one."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from sharding_specs import Mesh

from .. import _torch
from .processes import ProcessRuntime
from .simulated import SimulatedRuntime

__all__ = ["default_runtime", "is_main_rank", "use_runtime"]

_chosen: dict[Mesh, Any] = {}
_made: dict[tuple[Mesh, str], Any] = {}


def default_runtime(mesh: Mesh, reduction: str = "fast") -> Any:
    """The runtime of a mesh: one rank per process under torchrun (or with torch.distributed running), else simulated.

    >>> from sharding_specs import Mesh
    >>> type(default_runtime(Mesh(data=2))).__name__
    'SimulatedRuntime'

    Args:
        mesh: its size must be the number of processes, if there are several.
        reduction: "fast", the backend's own sums, or "ordered", sums in rank order, as simulated ranks always add.
    """
    if mesh in _chosen:
        return _chosen[mesh]
    if (mesh, reduction) not in _made:
        with _torch.apart_from_transforms():  # a program may be called there for the first time
            made = ProcessRuntime(mesh, reduction=reduction) if _is_launched() else SimulatedRuntime(mesh)
        _made[mesh, reduction] = made
    return _made[mesh, reduction]


def use_runtime(runtime: Any) -> None:
    """Use this runtime for its mesh from now on: one with a shorter timeout, or with ordered sums.

    >>> from sharding_specs import Mesh
    >>> from functional_parallel.runtime import SimulatedRuntime
    >>> use_runtime(SimulatedRuntime(Mesh(data=2), deduplicate=False))
    """
    _chosen[runtime.mesh] = runtime


def is_main_rank() -> bool:
    """Whether this process is the one that prints: rank 0, or the only one.

    >>> is_main_rank()
    True
    """
    return int(os.environ.get("RANK", "0")) == 0 if not dist.is_initialized() else dist.get_rank() == 0


def _is_launched() -> bool:
    under_launcher = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    return dist.is_available() and (dist.is_initialized() or under_launcher)
