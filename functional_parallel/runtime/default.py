"""Which runtime a mesh gets: real processes under a launcher, simulated ranks without one."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from sharding_specs import Mesh

from .processes import ProcessRuntime
from .simulated import SimulatedRuntime

__all__ = ["default_runtime", "is_main_rank", "use_runtime"]

_runtimes: dict[Mesh, Any] = {}


def default_runtime(mesh: Mesh) -> Any:
    """The runtime of a mesh: one rank per process under torchrun (or with torch.distributed running), else simulated.

    >>> from sharding_specs import Mesh
    >>> type(default_runtime(Mesh(data=2))).__name__
    'SimulatedRuntime'

    Args:
        mesh: its size must be the number of processes, if there are several.
    """
    if mesh not in _runtimes:
        _runtimes[mesh] = ProcessRuntime(mesh) if _is_launched() else SimulatedRuntime(mesh)
    return _runtimes[mesh]


def use_runtime(runtime: Any) -> None:
    """Use this runtime for its mesh from now on: one with a shorter timeout, or with ordered sums.

    >>> from sharding_specs import Mesh
    >>> from functional_parallel.runtime import SimulatedRuntime
    >>> use_runtime(SimulatedRuntime(Mesh(data=2), deduplicate=False))
    """
    _runtimes[runtime.mesh] = runtime


def is_main_rank() -> bool:
    """Whether this process is the one that prints: rank 0, or the only one.

    >>> is_main_rank()
    True
    """
    return int(os.environ.get("RANK", "0")) == 0 if not dist.is_initialized() else dist.get_rank() == 0


def _is_launched() -> bool:
    under_launcher = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    return dist.is_available() and (dist.is_initialized() or under_launcher)
