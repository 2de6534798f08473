"""Groups of all ranks, as the tests of shared memory use them."""

from __future__ import annotations

import torch.distributed as dist

from functional_parallel.runtime.calls import GroupWaits, ProcessGroupRef
from functional_parallel.runtime.processes.groups import AxisGroup
from functional_parallel.shared_memory.host_group import HostGroup
from functional_parallel.shared_memory.mapped_memory import SharedMemory


def group_of_all(rank: int, size: int, waits: GroupWaits | None = None, host: str | None = None) -> HostGroup:
    handle = ProcessGroupRef(dist.group.WORLD)
    return HostGroup(AxisGroup(handle, rank, tuple(range(size)), waits or GroupWaits()), host)


def memory_of_all(rank: int, size: int) -> SharedMemory:
    memory = group_of_all(rank, size).memory
    assert memory is not None
    return memory
